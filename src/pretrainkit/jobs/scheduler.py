"""What this project needs to know about a scheduler: the base class of slurm.py, pbs.py and sge.py."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretrainkit.config.launch import LaunchConfig
from pretrainkit.errors import PretrainkitError
from pretrainkit.jobs.job import Job
from pretrainkit.jobs.secrets import without_tokens
from pretrainkit.logs import masked

Run = Callable[[list[str]], str]
"""Runs a command and returns its output; raises PretrainkitError with the command's own message when it fails."""

_TIMEOUT_S = 120
_NO_SUCH_JOB = re.compile(r"Invalid job id|do not exist|Unknown [Jj]ob|has finished")


def run_here(words: list[str], *, timeout_s: float = _TIMEOUT_S, action: str = "") -> str:
    """Run a command on this machine, without a shell."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_s,
            env=without_tokens(os.environ),
        )
    except FileNotFoundError:
        raise PretrainkitError(
            f"no command {words[0]} here", action="submit from a login node of the cluster", where=words[0]
        ) from None
    except subprocess.TimeoutExpired:
        raise PretrainkitError(f"no answer within {timeout_s:g} s", where=words[0]) from None
    if done.returncode:
        said = masked((done.stderr or done.stdout).strip())
        found = f"{words[0]} failed with exit code {done.returncode}: {said}"
        raise PretrainkitError(found, action=action, where=words[0])
    return done.stdout


def runner_of(config: LaunchConfig) -> Run:
    """What runs the scheduler's commands: here, or on the site's login node over ssh."""
    if config.login_host is None:
        return run_here
    options = ["-o", "StrictHostKeyChecking=accept-new"]
    options += ["-l", config.login_user] if config.login_user else []
    options += ["-p", str(config.login_port)] if config.login_port else []
    options += ["-i", config.login_identity] if config.login_identity else []
    ssh = ["ssh", *options, config.login_host]
    action = "if ssh can't connect, check login_host, login_user and login_identity of the site"
    return lambda words: run_here([*ssh, shlex.join(words)], action=action)


@dataclass(frozen=True)
class Allocation:
    """The nodes of the job that this process runs in."""

    hosts: tuple[str, ...]
    """Each host once, in the scheduler's order; the first is the head."""
    slots: tuple[int, ...] = ()
    """Slots on each host under Grid Engine and PBS; empty under Slurm."""
    tasks_per_node: int = 1
    """Largest number of tasks that srun has started on a node."""


class Scheduler(ABC):
    """One scheduler: its words in job scripts, its commands, and what its variables say inside a job."""

    name: str
    """Value of --executor, and name of the script's template."""

    # Expressions of bash for the job's script.
    job_id: str
    array_job_id: str
    start: str
    """Name of this start of the job: a requeued job gets another one."""
    array_index: str
    """Index of an array's task, from 0."""
    is_first_start: str
    """A test that fails in a job that was requeued."""
    host_file = ""
    """Variable with the path of the job's list of hosts, whose lines begin with a host's name."""

    requeue_line = ""
    requeues_in_place = True
    """Whether a requeued job keeps its id, and with it the names of its files."""
    cancel_program = "qdel"
    cancel_signals = "TERM"
    """What a job gets first when it is cancelled."""
    account_option = ""
    """Option of the submit command that takes the account, unless the site names another."""
    default_account: str | None = None
    default_partition: str | None = None
    takes_task_lists = False
    """Whether one array can have any tasks; otherwise each range of tasks is submitted as an array."""
    takes_arrays_of_one = True

    query: tuple[str, ...]
    """Command that lists a job while it waits or runs; the job's id is appended."""
    history: tuple[str, ...]
    """Command that shows what is recorded about a job's end; the job's id is appended."""
    history_facts: str
    """Regular expression of what is shown of that."""
    job_id_pattern: str
    """Regular expression of a line that the submit command prints; its first group is the id."""

    def account(self, job: Job) -> str | None:
        """The account that pays for a job; None: the cluster's default."""
        return (self.default_account if job.config.account is None else job.config.account) or None

    def account_words(self, job: Job) -> list[str]:
        """Words of qsub that name the account."""
        account = self.account(job)
        return [job.config.account_option or self.account_option, account] if account else []

    def partition(self, job: Job) -> str | None:
        """Partition or queue of a job; None: the cluster's default."""
        asked = job.config.partition
        if not job.on_gpu and job.config.cpu_partition is not None:
            asked = job.config.cpu_partition
        return (self.default_partition if asked is None else asked) or None

    def resources(self, job: Job) -> list[str]:
        """Resource requests with their numbers filled in; the scheduler's default where the site names none."""
        texts = job.config.resources if job.on_gpu else job.config.cpu_resources
        return [job.filled(text, "resources") for text in texts or self.default_resources(job)]

    def default_resources(self, job: Job) -> tuple[str, ...]:
        """Resource requests of a job whose site names none."""
        return ()

    @abstractmethod
    def submit_command(self, job: Job, script: Path, after: str | None, tasks: tuple[int, int] | None) -> list[str]:
        """Words of the command that submits a script.

        Args:
            after: id of the job that has to end before this one starts, if there is one.
            tasks: first and last task, from 0, if it is an array.
        """

    def requeue(self, job: Job, script: Path) -> str:
        """What the job's script does to get back into the queue."""
        return self.requeue_line

    def is_listed(self, output: str) -> bool:
        """Whether the output of `query` has a job that waits or runs."""
        return bool(output.strip())

    def allocation(self, environment: Mapping[str, str]) -> Allocation | None:
        """The nodes of this process's job; None outside of this scheduler's jobs.

        In the job's list of hosts a line is a host and its slots, one for each queue that it is in, or a host alone for
        each slot.
        """
        path = Path(environment.get(self.host_file, ""))
        if not path.is_file():
            return None
        slots: Counter[str] = Counter()
        for host, *rest in filter(None, map(str.split, path.read_text(encoding="utf-8").splitlines())):
            slots[host] += int(rest[0]) if rest else 1
        return Allocation(tuple(slots), tuple(slots.values()))

    @abstractmethod
    def time_left(self, environment: Mapping[str, str], run: Run) -> float | None:
        """Seconds until this process's job is ended; None without a limit, or outside of this scheduler's jobs.

        Raises PretrainkitError when the scheduler doesn't answer.
        """

    def cancel_command(self, job_ids: Sequence[str]) -> list[str]:
        """Words of the command that cancels jobs."""
        return [self.cancel_program, *job_ids]

    def parse_job_id(self, output: str) -> str:
        """The job's id in what the submit command printed. Raises PretrainkitError when there is none."""
        for line in reversed(output.splitlines()):
            if match := re.fullmatch(self.job_id_pattern, line.strip()):
                return match[1]
        raise PretrainkitError(
            f"it printed no job id but {output.strip()!r}",
            action="check with the scheduler's own tools whether the job was submitted",
            where="the submit command",
        )

    def is_alive(self, job_id: str, run: Run) -> bool:
        """Whether a job waits or runs. Raises PretrainkitError when the scheduler doesn't answer."""
        try:
            return self.is_listed(run([*self.query, job_id]))
        except PretrainkitError as error:
            if _NO_SUCH_JOB.search(str(error)):
                return False
            raise

    def end_reason(self, job_id: str, run: Run) -> str:
        """What the scheduler has recorded about the end of a job; empty when nothing is known."""
        try:
            said = run([*self.history, job_id]).replace("\n\t", "")  # qstat breaks long lines
            found = re.findall(self.history_facts, said, re.MULTILINE)
        except PretrainkitError:
            return ""
        return "; ".join(" ".join(item.split()) for item in found)
