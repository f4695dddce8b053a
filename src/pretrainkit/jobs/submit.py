"""Submitting a job: either its folder is written and the scheduler accepts it, or nothing is left.

JOBS/
  jobs.jsonl                      a line for every job that was submitted: id, log, folder
  job_001/
    evaluation/                   the same of the job that evaluates checkpoints, which this job submits
    job.SCHEDULER.sh              what the scheduler runs; job.continue.SCHEDULER.sh: the later jobs of a chain
    node.sh  run.sh               what a node runs on the host, and in the container
    shell.sh                      the login shell of a PBS job
    code/                         the source that runs
    source.txt                    its commit and uncommitted changes
    SCHEDULER-ID.log  exit-ID     output and exit code
    nodes/                        files by which the nodes find each other (`rendezvous.py`)
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import pretrainkit
from pretrainkit import files
from pretrainkit.errors import PretrainkitError
from pretrainkit.jobs import scripts
from pretrainkit.jobs.job import Job
from pretrainkit.jobs.registry import SCHEDULERS
from pretrainkit.jobs.scheduler import Run, runner_of
from pretrainkit.jobs.secrets import passed_on, write_secrets
from pretrainkit.records import decode
from pretrainkit.run import json_lines
from pretrainkit.run.folder import CHAIN_FILE, JOBS_FILE, SOURCE_FILE
from pretrainkit.units import consecutive_ranges

SECRETS = "secrets.sh"
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "*.egg-info")


@dataclass(frozen=True)
class SubmittedJob:
    """A job that a scheduler has accepted."""

    scheduler: str
    job_id: str
    folder: str
    logs: tuple[str, ...]
    """One for each task of an array, or one."""
    exit_files: tuple[str, ...]
    """Files that will hold the exit codes, in the order of the logs."""
    command: str
    time: str

    @classmethod
    def of(cls, scheduler: str, job_id: str, folder: Path, tasks: tuple[int, ...], command: str) -> SubmittedJob:
        """A job that was submitted now."""
        suffixes = [f"_{task}" for task in tasks] or [""]
        number = job_id.removesuffix("[]")
        logs = tuple(str(folder / f"{scheduler}-{number}{suffix}.log") for suffix in suffixes)
        exit_files = tuple(str(folder / f"exit-{number}{suffix}") for suffix in suffixes)
        return cls(scheduler, job_id, str(folder), logs, exit_files, command, time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    @property
    def successor(self) -> SubmittedJob | None:
        """The job that a PBS job has submitted to continue it; with other schedulers a requeued job keeps its id."""
        try:
            last = (Path(self.folder) / CHAIN_FILE).read_text(encoding="utf-8").splitlines()[-1]
        except OSError:  # the folder was removed
            return None
        job_id = SCHEDULERS[self.scheduler].parse_job_id(last)
        if job_id == self.job_id:
            return None
        return SubmittedJob.of(self.scheduler, job_id, Path(self.folder), (), self.command)

    @property
    def cancel_command(self) -> str:
        """The command that cancels it."""
        return shlex.join(SCHEDULERS[self.scheduler].cancel_command([self.job_id]))

    def is_alive(self, run: Run) -> bool:
        """Whether it waits or runs. Raises PretrainkitError when the scheduler doesn't answer."""
        return SCHEDULERS[self.scheduler].is_alive(self.job_id, run)


@dataclass(frozen=True)
class _Part:
    """One job of a submission: of a chain, or of an array that the scheduler doesn't accept as one."""

    name: str
    text: str
    tasks: tuple[int, ...] = ()
    is_array: bool = False
    follows: bool = False
    """Whether it starts after the part before it has ended."""

    def submit_command(self, job: Job, after: str | None) -> list[str]:
        tasks = (self.tasks[0], self.tasks[-1]) if self.is_array else None
        script = job.folder / self.name
        return SCHEDULERS[job.config.executor].submit_command(job, script, after if self.follows else None, tasks)


def next_folder(jobs_dir: Path) -> Path:
    """The folder that the next job will have; it isn't made."""
    numbers = [int(path.name[4:]) for path in jobs_dir.glob("job_*") if path.name[4:].isdigit()]
    return jobs_dir / f"job_{max(numbers, default=0) + 1:03d}"


def describe(job: Job) -> str:
    """Everything that a submission would write and run, for --dry_run."""
    parts = _parts(job)
    scripts_by_name = {part.name: part.text for part in parts} | scripts.inner_scripts(job)
    texts = [f"# {job.folder / name}\n{text}" for name, text in scripts_by_name.items()]
    if job.evaluation:
        texts.append(describe(job.evaluation.job))
    commands = [shlex.join(part.submit_command(job, f"JOB_ID_{number}")) for number, part in enumerate(parts)]
    return "\n".join([*texts, "# submitted by", *commands])


def submit(job: Job, script: Path, source_text: str) -> list[SubmittedJob]:
    """Submit a job (a chain: several). The scheduler has all of it, or none, and then nothing is left on disk.

    Args:
        script: absolute path of the script that the job's command runs; it is copied with its folder and this package.
        source_text: content of source.txt.

    Raises:
        PretrainkitError: the scheduler refused it, with its words.
    """
    scheduler = SCHEDULERS[job.config.executor]
    run = runner_of(job.config)
    # Rendering comes first: it finds what is wrong with the request before anything is written.
    parts = _parts(job)
    texts = _texts(job, parts) | {SOURCE_FILE: source_text}
    submitted: list[SubmittedJob] = []
    new_parents = [path for path in job.folder.parents if not path.exists()]
    job.folder.mkdir(parents=True)
    try:
        _write(job, texts, script)
        if job.evaluation:
            nested = job.evaluation.job
            _write(nested, _texts(nested, _parts(nested)), script)
        for part in parts:
            words = part.submit_command(job, submitted[-1].job_id if submitted else None)
            job_id = scheduler.parse_job_id(run(words))
            submitted.append(SubmittedJob.of(scheduler.name, job_id, job.folder, part.tasks, command=shlex.join(words)))
        files.write_text(job.folder / CHAIN_FILE, "".join(f"{one.job_id}\n" for one in submitted))
        with (job.folder.parent / JOBS_FILE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in submitted)
    except BaseException:
        if submitted:
            with suppress(PretrainkitError):
                run(scheduler.cancel_command([one.job_id for one in submitted]))
        shutil.rmtree(job.folder, ignore_errors=True)
        for parent in new_parents:
            with suppress(OSError):
                parent.rmdir()
        raise
    return submitted


def _texts(job: Job, parts: list[_Part]) -> dict[str, str]:
    return {**scripts.inner_scripts(job), **{part.name: part.text for part in parts}}


def _write(job: Job, texts: dict[str, str], script: Path) -> None:
    """Write a job's folder, whole but for what its submission adds."""
    copy_source(job.folder / scripts.CODE, script)
    for name, text in texts.items():
        files.write_text(job.folder / name, text)
    if scripts.SHELL in texts:
        (job.folder / scripts.SHELL).chmod(0o777 & ~job.umask)
    if job.secrets:
        write_secrets(job.secrets, passed_on(os.environ)[1])


def copy_source(target: Path, script: Path) -> None:
    """Copy this package and the folder of a command's script, so that later edits don't affect a job that waits.

    The layout is that of the checkout: target/src/pretrainkit, target/FOLDER/script.py. Uncommitted changes are
    copied too; `run/source.py` describes them.
    """
    package = Path(pretrainkit.__file__).parent
    shutil.copytree(package, target / "src" / package.name, ignore=_IGNORED)
    shutil.copytree(script.parent, target / script.parent.name, ignore=_IGNORED)
    constraints = package.parents[1] / "constraints.txt"
    if constraints.is_file():  # a checkout: the preflight of a node compares with it
        shutil.copyfile(constraints, target / constraints.name)


def read_records(jobs_dir: Path) -> list[SubmittedJob]:
    """All jobs that were submitted from a folder, in order."""
    return [decode(SubmittedJob, record) for record in json_lines.read_records(jobs_dir / JOBS_FILE)]


def _parts(job: Job) -> list[_Part]:
    if job.array is None:
        return [_part(job, "job"), *(_part(job, "job.continue", follows=True) for _ in range(1, job.config.chain))]
    if SCHEDULERS[job.config.executor].takes_task_lists:
        return [_part(job, "job", job.array.indices)]
    return [_part(job, "job", tuple(range(first, last + 1))) for first, last in consecutive_ranges(job.array.indices)]


def _part(job: Job, stem: str, tasks: tuple[int, ...] = (), *, follows: bool = False) -> _Part:
    scheduler = SCHEDULERS[job.config.executor]
    is_array = len(tasks) > (0 if scheduler.takes_arrays_of_one else 1)
    index = tasks[0] if tasks and not is_array else None
    name = f"{stem}.{scheduler.name}.sh" if index is None else f"{stem}.task_{index}.{scheduler.name}.sh"
    text = scripts.job_script(job, job.folder / name, continues=follows, index=index)
    return _Part(name, text, tasks, is_array, follows)
