"""Submitting a job: its folder, scripts and source are made, the scheduler takes it, or nothing is left.

JOBS/
  jobs.jsonl                      a line for every job that was submitted: id, log, folder
  job_001/
    job.SCHEDULER.sh              what the scheduler runs; job.continue.SCHEDULER.sh: the later jobs of a chain
    node.sh  run.sh               what a node runs on the host, and in the container
    code/                         the source that runs
    source.txt                    what that is
    SCHEDULER-ID.log  exit-ID     output and exit code
    nodes/                        how the nodes meet (`meeting.py`)
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrainkit import files
from pretrainkit.errors import PretrainkitError
from pretrainkit.jobs import schedulers, scripts
from pretrainkit.jobs.job import Job
from pretrainkit.jobs.secrets import write_secrets
from pretrainkit.logs import get_logger

RECORDS = "jobs.jsonl"
SECRETS = "secrets.sh"
SOURCE = "source.txt"

log = get_logger(__name__)


@dataclass(frozen=True)
class SubmittedJob:
    """A job that a scheduler has taken."""

    scheduler: str
    job_id: str
    folder: str
    logs: tuple[str, ...]
    """One for each array task, or one."""
    exit_files: tuple[str, ...]
    """Where the exit codes will stand, in the order of the logs."""
    command: str
    time: str

    @property
    def cancel_command(self) -> str:
        """How it is cancelled."""
        return schedulers.shown(schedulers.cancel_command(self.scheduler, [self.job_id]))


@dataclass(frozen=True)
class _Part:
    """One job of a submission: of a chain, or of an array that the scheduler doesn't take as one."""

    name: str
    text: str
    tasks: tuple[int, ...] = ()
    is_array: bool = False
    follows: bool = False
    """Whether it starts after the one before has ended."""


def next_folder(jobs_dir: Path) -> Path:
    """The folder that the next job will have; it isn't made."""
    numbers = [int(path.name[4:]) for path in jobs_dir.glob("job_*") if path.name[4:].isdigit()]
    return jobs_dir / f"job_{max(numbers, default=0) + 1:03d}"


def describe(job: Job) -> str:
    """Everything that a submission would write and run, for --dry_run."""
    texts = []
    parts = _parts(job)
    shown: set[str] = set()
    for part in parts:
        if part.name not in shown:
            shown.add(part.name)
            texts.append(f"# {job.folder / part.name}\n{part.text}")
    for name, text in _inner_scripts(job).items():
        texts.append(f"# {job.folder / name}\n{text}")
    commands = []
    for number, part in enumerate(parts):
        words = _submit_words(job, part, f"JOB_ID_{number}" if part.follows else None)
        commands.append(schedulers.shown(words))
    return "\n".join([*texts, "# submitted by", *commands])


def submit(
    job: Job, *, copy_source: Callable[[Path], object], source_text: str, secrets: dict[str, str]
) -> list[SubmittedJob]:
    """Submit a job (a chain: several). The scheduler has all of it, or none, and then nothing is left on disk.

    Args:
        copy_source: makes the copy of the source that the job's command names, in the given folder.
        secrets: tokens, for the job's file with mode 600.

    Raises:
        PretrainkitError: the scheduler refused it, with its words.
    """
    commands = schedulers.commands_of(job.config)
    # The texts come first: what is wrong with the request is found before anything is written.
    parts, inner = _parts(job), _inner_scripts(job)
    submitted: list[SubmittedJob] = []
    with _made_folder(job.folder, submitted, commands):
        copy_source(job.folder / scripts.CODE)
        for name, text in {**inner, **{part.name: part.text for part in parts}, SOURCE: source_text}.items():
            files.write_text(job.folder / name, text)
        if job.secrets:
            write_secrets(job.secrets, secrets)
        for part in parts:
            after = submitted[-1].job_id if part.follows else None
            words = _submit_words(job, part, after)
            job_id = schedulers.parse_job_id(job.config.executor, commands.run(words))
            submitted.append(_submitted(job, part, job_id, words))
        files.write_text(job.folder / scripts.CHAIN, "".join(f"{one.job_id}\n" for one in submitted))
        _record(job.folder.parent / RECORDS, submitted)
    return submitted


def read_records(jobs_dir: Path) -> list[SubmittedJob]:
    """All jobs that were submitted from a folder, in order."""
    path = jobs_dir / RECORDS
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        records.append(
            SubmittedJob(**{**record, "logs": tuple(record["logs"]), "exit_files": tuple(record["exit_files"])})
        )
    return records


def announce(submitted: list[SubmittedJob]) -> None:
    """Tell ids, logs and how to cancel: ids and logs on stdout."""
    for job in submitted:
        print(f"job {job.job_id}  log {job.logs[0] if len(job.logs) == 1 else f'{job.logs[0]} ...'}")
    sys.stdout.flush()
    ids = [job.job_id for job in submitted]
    log.info("to cancel: %s", schedulers.shown(schedulers.cancel_command(submitted[0].scheduler, ids)))


@contextlib.contextmanager
def _made_folder(folder: Path, submitted: list[SubmittedJob], commands: schedulers.Commands) -> Iterator[None]:
    """Make a job's folder; when the block fails, cancel what was submitted and remove the folder."""
    is_new = not folder.parent.exists()
    folder.mkdir(parents=True)
    try:
        yield
    except BaseException:
        if submitted:
            with contextlib.suppress(PretrainkitError):
                commands.run(schedulers.cancel_command(submitted[0].scheduler, [job.job_id for job in submitted]))
        shutil.rmtree(folder, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                folder.parent.rmdir()
        raise


def _parts(job: Job) -> list[_Part]:
    executor = job.config.executor
    ending = f"{executor}.sh"
    if job.array is None:
        first = _Part(f"job.{ending}", _script(job, f"job.{ending}", continues=False))
        name = f"job.continue.{ending}"
        later = [_Part(name, _script(job, name, continues=True), follows=True) for _ in range(1, job.config.chain)]
        return [first, *later]
    if executor == "slurm":
        return [_Part(f"job.{ending}", _script(job, f"job.{ending}", continues=False), job.array.indices, True)]
    parts = []
    for first_task, last_task in job.array.ranges:
        tasks = tuple(range(first_task, last_task + 1))
        # PBS has no arrays of one task.
        is_array = executor == "sge" or len(tasks) > 1
        name = f"job.{ending}" if is_array else f"job.task_{first_task}.{ending}"
        index = None if is_array else first_task
        parts.append(_Part(name, _script(job, name, continues=False, is_array=is_array, index=index), tasks, is_array))
    return parts


def _script(job: Job, name: str, *, continues: bool, is_array: bool = False, index: int | None = None) -> str:
    if job.config.executor == "slurm":
        from pretrainkit.jobs.slurm import slurm_script

        return slurm_script(job, continues=continues)
    return scripts.batch_script(job, continues=continues, script=job.folder / name, is_array=is_array, index=index)


def _inner_scripts(job: Job) -> dict[str, str]:
    texts = {scripts.RUN: scripts.run_script(job)}
    if not (job.container and job.container.runtime == "pyxis"):
        texts[scripts.NODE] = scripts.node_script(job)
    return texts


def _submit_words(job: Job, part: _Part, after: str | None) -> list[str]:
    tasks = (part.tasks[0], part.tasks[-1]) if part.is_array else None
    return schedulers.submit_command(job, job.folder / part.name, after=after, tasks=tasks)


def _submitted(job: Job, part: _Part, job_id: str, words: list[str]) -> SubmittedJob:
    tasks = [f"_{task}" for task in part.tasks] or [""]
    return SubmittedJob(
        scheduler=job.config.executor,
        job_id=job_id,
        folder=str(job.folder),
        logs=tuple(str(job.folder / f"{job.config.executor}-{job_id}{task}.log") for task in tasks),
        exit_files=tuple(str(job.folder / f"exit-{job_id}{task}") for task in tasks),
        command=schedulers.shown(words),
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def _record(path: Path, submitted: list[SubmittedJob]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(job), ensure_ascii=False) + "\n" for job in submitted)
