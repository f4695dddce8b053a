"""The scripts of a job, rendered from templates/: text alone, no scheduler is asked and nothing is written.

    run.sh    what a node or array task runs, inside the container if there is one
    node.sh   what it runs on the host: modules, then the container with run.sh
    job.*.sh  the scheduler's part: what is requested, node.sh on every node, and what follows from how it ended

Every word that comes from a user is quoted here, once, for bash.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrainkit.errors import RequestError
from pretrainkit.jobs.caches import CACHES
from pretrainkit.jobs.job import Job, safe_name
from pretrainkit.units import parse_duration

if TYPE_CHECKING:
    from jinja2 import Environment

RUN, NODE = "run.sh", "node.sh"
CODE = "code"
"""Folder of a job with the source that it runs."""
CHAIN = "chain"
"""File of a job's folder with the ids of the jobs of a chain, in order, one a line."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE_CACHES = {
    "apptainer": {"APPTAINER_CACHEDIR": "apptainer", "APPTAINER_TMPDIR": "tmp"},
    "pyxis": {"ENROOT_CACHE_PATH": "enroot", "ENROOT_DATA_PATH": "enroot-data", "ENROOT_TEMP_PATH": "tmp"},
}


@dataclass(frozen=True)
class Scheduler:
    """What differs between schedulers in the parts of a script that they share: words of bash."""

    job_id: str
    array_job_id: str
    start: str
    array_index: str
    is_first: str
    """A test that succeeds unless the scheduler has started this job before."""
    cancel: str
    host_list: str = ""


SCHEDULERS = {
    "slurm": Scheduler(
        job_id='"$SLURM_JOB_ID"',
        array_job_id='"$SLURM_ARRAY_JOB_ID"',
        start='"${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}"',
        array_index='"$SLURM_ARRAY_TASK_ID"',
        is_first='[ "${SLURM_RESTART_COUNT:-0}" = 0 ]',
        cancel="scancel",
    ),
    "sge": Scheduler(
        job_id='"$JOB_ID"',
        array_job_id='"$JOB_ID"',
        start='"${JOB_ID}_$(date +%s)"',
        array_index='"$((SGE_TASK_ID - 1))"',
        is_first='[ "${RESTARTED:-0}" = 0 ]',
        cancel="qdel",
        host_list="awk '!seen[$1]++ { print $1 }' \"$PE_HOSTFILE\"",
    ),
    "pbs": Scheduler(
        job_id='"${PBS_JOBID%%[.[]*}"',
        array_job_id='"${PBS_JOBID%%[.[]*}"',
        start='"${PBS_JOBID%%[.[]*}_$(date +%s)"',
        array_index='"$PBS_ARRAY_INDEX"',
        is_first='[ -z "${PRETRAINKIT_CONTINUES:-}" ]',
        cancel="qdel",
        host_list="awk '!seen[$1]++ { print $1 }' \"$PBS_NODEFILE\"",
    ),
}


def run_script(job: Job) -> str:
    """The text of run.sh. Raises RequestError for a variable whose name bash doesn't take."""
    environment = {**caches_of(job), **job.environment, **job.config.environment}
    for name in environment:
        if not _NAME.fullmatch(name):
            raise RequestError(f"{name!r}", needed="letters, digits and _", where="--env")
    return _render(
        "run.sh.j2",
        **_common(job),
        work_dir=job.work_dir,
        environment=environment,
        python_path=job.folder / CODE / "src",
        secrets=job.secrets,
        command=job.command,
    )


def node_script(job: Job) -> str:
    """The text of node.sh."""
    return _render("node.sh.j2", **_common(job), **_host(job), run_script=job.folder / RUN, image_file=image_file(job))


def slurm_setup(job: Job, *, continues: bool) -> str:
    """What a Slurm job's script does before srun, and when that has ended."""
    pyxis = job.container is not None and job.container.runtime == "pyxis"
    return _render(
        "slurm_setup.sh.j2",
        **_common(job),
        **_host(job),
        **_scheduler(job, job.array is not None),
        continues=continues,
        pyxis=pyxis,
        requeue='scontrol requeue "$SLURM_JOB_ID"' if job.config.requeue else "",
    )


def batch_script(job: Job, *, continues: bool, script: Path, is_array: bool, index: int | None = None) -> str:
    """The text of a PBS or Grid Engine job script.

    Args:
        script: where it will stand.
        is_array: whether it is submitted as a scheduler's array.
        index: the one task of job.array that it runs, where it isn't.
    """
    executor = job.config.executor
    resubmit = shlex.join(["qsub", *job.account_words, "-v", "PRETRAINKIT_CONTINUES=1", "-o", "/dev/null"])
    requeue = {
        "sge": "code=99 # Grid Engine starts a job with this exit code again",
        "pbs": f'{resubmit} {shlex.quote(str(script))} >> "$folder/{CHAIN}" || echo "qsub failed" >&2',
    }
    shared = _scheduler(job, is_array)
    if index is not None:
        shared["array_index"] = str(index)
    return _render(
        f"{executor}.sh.j2",
        **_common(job),
        **shared,
        continues=continues,
        requeue=requeue[executor] if job.config.requeue else "",
        name=safe_name(job.name),
        partition=job.partition,
        resources=job.resources,
        scheduler_options=job.scheduler_options,
        time_limit=_hours(job.time_limit),
        num_nodes=job.num_nodes,
        node_launcher=job.config.node_launcher,
        variables_pattern="PRETRAINKIT_|PBS_|SGE_|JOB_ID=|PE_HOSTFILE=|NSLOTS=",
    )


def caches_of(job: Job) -> dict[str, str]:
    """Variables that lead caches to the group's disk."""
    return {name: str(folder) for name, folder in _cache_folders(job, CACHES).items()}


def image_file(job: Job) -> Path | None:
    """Where an image from a registry is kept for Apptainer, unpacked once."""
    if job.container is None or job.container.is_local or job.container.runtime != "apptainer":
        return None
    base = _cache_dir(job) or job.folder.parent
    return base / "images" / f"{re.sub(r'[^A-Za-z0-9.-]+', '_', job.container.image.partition('://')[2])}.sif"


def _cache_dir(job: Job) -> Path | None:
    if not job.config.cache_dir:
        return None
    return Path(os.path.expandvars(job.config.cache_dir)).expanduser().absolute() / getpass.getuser()


def _cache_folders(job: Job, names: dict[str, str]) -> dict[str, Path]:
    base = _cache_dir(job)
    return {name: base / folder for name, folder in names.items()} if base else {}


def _host(job: Job) -> dict[str, Any]:
    """What the host's part of a script needs."""
    runtime = job.container.runtime if job.container else ""
    caches = _cache_folders(job, _IMAGE_CACHES.get(runtime, {}))
    folders = [*caches.values(), *_cache_folders(job, CACHES).values()]
    if file := image_file(job):
        folders.append(file.parent)
    return {
        "modules": job.config.modules,
        "setup": job.config.setup,
        "host_environment": {name: str(folder) for name, folder in caches.items()},
        "folders": [str(folder) for folder in dict.fromkeys(folders)],
    }


def _common(job: Job) -> dict[str, Any]:
    return {
        "unit": "task" if job.array else "node",
        "container": job.container,
        "array": job.array,
        "folder": job.folder,
        "chain": job.config.chain,
    }


def _scheduler(job: Job, is_array: bool) -> dict[str, Any]:
    words = SCHEDULERS[job.config.executor]
    return {
        "scheduler": job.config.executor,
        "job_id": words.array_job_id if is_array else words.job_id,
        "start": words.start,
        "array_index": words.array_index,
        "restarted": words.is_first,
        "cancel": words.cancel,
        "host_list": words.host_list,
    }


def _hours(time_limit: str | None) -> str:
    """A time limit as PBS and Grid Engine take it: HH:MM:SS without days."""
    if time_limit is None:
        return ""
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
    environment.filters["join_words"] = _join_words
    return environment


def _join_words(words: Iterable[object]) -> str:
    return shlex.join(str(word) for word in words)
