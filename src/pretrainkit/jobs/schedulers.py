"""What is asked of a scheduler by its own commands: submit, cancel, and whether a job is still there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pretrainkit.config.launch import LaunchConfig
from pretrainkit.errors import PretrainkitError
from pretrainkit.jobs.job import Job
from pretrainkit.jobs.secrets import without_tokens
from pretrainkit.logs import masked

_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+@=-]+")
_TIMEOUT_S = 120


class Commands(Protocol):
    """Something that runs commands."""

    def run(self, words: list[str]) -> str:
        """The output of a command. Raises PretrainkitError with its own words when it fails."""


class LocalCommands:
    """Runs commands on this machine, without a shell between."""

    def run(self, words: list[str]) -> str:
        """The output of a command. Raises PretrainkitError with its own words when it fails."""
        try:
            done = subprocess.run(
                words,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=_TIMEOUT_S,
                env=without_tokens(os.environ),
            )
        except FileNotFoundError:
            raise PretrainkitError(
                f"no command {words[0]} here", action="submit from a login node of the cluster", where=words[0]
            ) from None
        except subprocess.TimeoutExpired:
            raise PretrainkitError(f"no answer within {_TIMEOUT_S} s", where=words[0]) from None
        if done.returncode:
            said = masked((done.stderr or done.stdout).strip())
            raise PretrainkitError(f"{words[0]} failed with exit code {done.returncode}: {said}", where=words[0])
        return done.stdout


def commands_of(config: LaunchConfig) -> Commands:
    """How the scheduler of a site is spoken to."""
    if config.executor == "slurm":
        from pretrainkit.jobs.slurm import SlurmCommands

        return SlurmCommands(config)
    return LocalCommands()


def submit_command(
    job: Job, script: Path, *, after: str | None = None, tasks: tuple[int, int] | None = None
) -> list[str]:
    """Words of the command that submits a script.

    Args:
        after: id of the job after whose end it may start.
        tasks: first and last task of a PBS or Grid Engine array, counted from 0.
    """
    executor = job.config.executor
    if executor == "slurm":
        dependency = [f"--dependency=afterany:{after}"] if after else []
        return ["sbatch", "--requeue", "--parsable", *dependency, str(script)]
    # The script writes its own log; this is for what the scheduler says before and after it.
    output = str(job.folder / "scheduler.log") if _PLAIN_PATH.fullmatch(str(job.folder)) else "/dev/null"
    words = ["qsub", *job.account_words]
    if executor == "sge":
        words += ["-terse", "-o", output]
        words += ["-hold_jid", after] if after else []
        if tasks:
            words += ["-t", f"{tasks[0] + 1}-{tasks[1] + 1}"]
            words += ["-tc", str(job.array.at_once)] if job.array and job.array.at_once else []
    else:
        words += ["-o", output]
        words += ["-W", f"depend=afterany:{after}"] if after else []
        if tasks:
            limit = f"%{job.array.at_once}" if job.array and job.array.at_once else ""
            words += ["-J", f"{tasks[0]}-{tasks[1]}{limit}"]
    return [*words, str(script)]


def parse_job_id(executor: str, output: str) -> str:
    """The job's id in what the submit command printed. Raises PretrainkitError when there is none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    pattern = {
        "slurm": r"(\d+)(?:;.*)?",  # with clusters: 17;name
        "sge": r"(?:Your job(?:-array)? )?(\d+)(?:\..*|[ (].*)?",
        "pbs": r"(\d+)(?:\[\])?(?:\..*)?",
    }[executor]
    for line in reversed(lines):
        if match := re.fullmatch(pattern, line):
            return match[1]
    raise PretrainkitError(
        f"it said no job id but {output.strip()!r}",
        action="look with the scheduler's own tools whether the job is there",
        where="the submit command",
    )


def cancel_command(executor: str, job_ids: Sequence[str]) -> list[str]:
    """Words of the command that cancels jobs."""
    return [{"slurm": "scancel", "sge": "qdel", "pbs": "qdel"}[executor], *job_ids]


def is_alive(executor: str, job_id: str, commands: Commands) -> bool:
    """Whether the scheduler still has a job waiting or running. Raises PretrainkitError when it can't be asked."""
    if executor == "slurm":
        try:
            states = commands.run(["squeue", "--noheader", "--format=%T", "--jobs", job_id]).split()
        except PretrainkitError as error:
            if "Invalid job id" in str(error):
                return False
            raise
        return any(state not in _SLURM_ENDED for state in states)
    try:
        if executor == "sge":
            commands.run(["qstat", "-j", job_id])
            return True
        return bool(commands.run(["qstat", job_id]).strip())
    except PretrainkitError as error:
        if re.search(r"do not exist|Unknown Job|has finished|Unknown job", str(error)):
            return False
        raise


_SLURM_ENDED = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED"),
    *("BOOT_FAIL", "DEADLINE", "SPECIAL_EXIT", "REVOKED"),
)


def shown(words: Sequence[str]) -> str:
    """A command as one can type it."""
    return shlex.join(words)
