"""The scripts of a job, rendered from templates/. Pure: no scheduler is asked and nothing is written.

    run.sh    what a node or array task runs, inside the container if there is one
    node.sh   what it runs on the host: modules, then the container with run.sh
    shell.sh  the login shell of a PBS job
    job.*.sh  the scheduler's part: what is requested, node.sh on every node, and what follows from how it ended

Every word that comes from a user is quoted here, once, for bash.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrainkit.errors import RequestError
from pretrainkit.jobs.job import Job
from pretrainkit.jobs.pbs import SHELL
from pretrainkit.jobs.registry import SCHEDULERS
from pretrainkit.units import parse_duration

if TYPE_CHECKING:
    from jinja2 import Environment

RUN, NODE = "run.sh", "node.sh"
CODE = "code"
"""Folder of a job with the source that it runs."""
CACHES = {
    "HF_HOME": "huggingface",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "WANDB_CACHE_DIR": "wandb",
    "WANDB_DATA_DIR": "wandb",
    "WANDB_CONFIG_DIR": "wandb",
    "MPLCONFIGDIR": "matplotlib",
    "XDG_CACHE_HOME": "xdg",
}
"""Variables of caches -> their folder in cache_dir, on a group's disk: they would fill a home."""
HOME_CACHES = {
    "HF_HOME": ".cache/huggingface",
    "TRITON_CACHE_DIR": ".triton",
    "WANDB_CACHE_DIR": ".cache/wandb",
}
"""Variables of caches that grow by gigabytes -> their default folder in the home."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE_CACHES = {
    "apptainer": {"APPTAINER_CACHEDIR": "apptainer", "APPTAINER_TMPDIR": "tmp"},
    "pyxis": {"ENROOT_CACHE_PATH": "enroot", "ENROOT_DATA_PATH": "enroot-data", "ENROOT_TEMP_PATH": "tmp"},
}


def inner_scripts(job: Job) -> dict[str, str]:
    """Names and texts of what is started on a node: with pyxis only run.sh, since srun itself enters the container.

    Raises RequestError for a variable whose name bash doesn't accept.
    """
    environment = {**_cache_folders(job, CACHES), **job.environment, **job.config.environment}
    for name in environment:
        if not _NAME.fullmatch(name):
            raise RequestError(f"{name!r}", needed="letters, digits and _", where="--env")
    texts = {RUN: _render("run.sh.j2", job=job, environment=environment, python_path=job.folder / CODE / "src")}
    if not job.in_pyxis:
        values = {**_host(job), "run_script": job.folder / RUN, "image_file": _image_file(job)}
        texts[NODE] = _render("node.sh.j2", job=job, **values)
    if job.config.executor == "pbs":
        texts[SHELL] = _render("shell.sh.j2")
    return texts


def job_script(job: Job, script: Path, *, continues: bool, index: int | None) -> str:
    """The text of the script that the scheduler runs.

    Args:
        script: path at which it will be written.
        continues: whether it only continues a run that ran out of time.
        index: the one task of job.array that it runs, where that isn't an array for the scheduler.
    """
    scheduler = SCHEDULERS[job.config.executor]
    return _render(
        f"{scheduler.name}.sh.j2",
        job=job,
        scheduler=scheduler,
        job_id=scheduler.array_job_id if job.array and index is None else scheduler.job_id,
        array_index=scheduler.array_index if index is None else index,
        continues=continues,
        requeue=scheduler.requeue(job, script) if job.config.requeue and not job.array else "",
        inner=job.folder / (RUN if job.in_pyxis else NODE),
        submit_evaluation=_submission(job.evaluation.job) if job.evaluation else (),
        **_host(job),
    )


def _submission(job: Job) -> list[str]:
    """Words that submit the job of evaluations, whose script is its only one."""
    scheduler = SCHEDULERS[job.config.executor]
    return scheduler.submit_command(job, job.folder / f"job.{scheduler.name}.sh", None, None)


def _image_file(job: Job) -> Path | None:
    """File to which Apptainer unpacks an image from a registry once; None for another image or runtime."""
    if job.container is None or job.container.is_local or job.container.runtime != "apptainer":
        return None
    base = _cache_dir(job) or job.folder.parent
    return base / "images" / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', job.container.image.partition('://')[2])}.sif"


def _cache_dir(job: Job) -> Path | None:
    if not job.config.cache_dir:
        return None
    return Path(os.path.expandvars(job.config.cache_dir)).expanduser().absolute() / getpass.getuser()


def _cache_folders(job: Job, names: dict[str, str]) -> dict[str, str]:
    base = _cache_dir(job)
    return {name: str(base / folder) for name, folder in names.items()} if base else {}


def _host(job: Job) -> dict[str, Any]:
    """What the host's part of a script needs."""
    caches = _cache_folders(job, _IMAGE_CACHES.get(job.container.runtime, {}) if job.container else {})
    folders = [*caches.values(), *_cache_folders(job, CACHES).values()]
    if file := _image_file(job):
        folders.append(str(file.parent))
    return {"host_environment": caches, "folders": list(dict.fromkeys(folders))}


def _hours(time_limit: str) -> str:
    """A time limit as PBS and Grid Engine accept it: HH:MM:SS without days."""
    seconds = int(parse_duration(time_limit))
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pretrainkit.jobs"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{##",  # bash has ${#words[@]}
        comment_end_string="##}",
        autoescape=False,  # this is bash, not HTML: words are quoted by the filters
    )
    environment.filters["quote"] = lambda word: shlex.quote(str(word))
    environment.filters["join_words"] = lambda words: shlex.join(str(word) for word in words)
    environment.filters["hours"] = _hours
    environment.filters["seconds"] = lambda time_limit: int(parse_duration(time_limit))
    environment.filters["octal"] = lambda mask: f"{mask:04o}"
    return environment
