"""Slurm. NeMo-Run's SlurmExecutor holds what a job requests, and its tunnel runs Slurm's commands.

NeMo-Run's own script and experiments aren't used: they need accounting, and put paths, variables and arguments
unquoted into commands. Here templates/slurm.sh.j2 is the script.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pretrainkit.config.launch import DEFAULT_SLURM_ACCOUNT, DEFAULT_SLURM_PARTITION, LaunchConfig
from pretrainkit.errors import PretrainkitError, RequestError
from pretrainkit.imports import heavy_imports
from pretrainkit.jobs.job import Job
from pretrainkit.jobs.scheduler import Allocation, Run, Scheduler, ask
from pretrainkit.jobs.secrets import without_tokens
from pretrainkit.units import parse_duration

_ENDED = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED"),
    *("BOOT_FAIL", "DEADLINE", "SPECIAL_EXIT", "REVOKED"),
)
_HOST_LIST = "Slurm's form, such as n[01-03,7]"


class Slurm(Scheduler):
    """Slurm, whose srun starts one process on each node."""

    name = "slurm"
    job_id = '"$SLURM_JOB_ID"'
    array_job_id = '"$SLURM_ARRAY_JOB_ID"'
    start = '"${SLURM_JOB_ID}_${SLURM_RESTART_COUNT:-0}"'
    array_index = '"$SLURM_ARRAY_TASK_ID"'
    is_first_start = '[ "${SLURM_RESTART_COUNT:-0}" = 0 ]'
    cancel_program = "scancel"
    default_account = DEFAULT_SLURM_ACCOUNT
    default_partition = DEFAULT_SLURM_PARTITION
    takes_task_lists = True
    job_id_pattern = r"(\d+)(?:;.*)?"  # with several clusters: 17;name
    requeue_line = 'scontrol requeue "$SLURM_JOB_ID"'
    query = ("squeue", "--noheader", "--format=%T", "--jobs")
    history = ("scontrol", "show", "job")
    history_facts = r"(?:JobState|Reason|ExitCode)=\S+"

    def default_resources(self, job: Job) -> tuple[str, ...]:
        """The GPUs of each node."""
        return ("gpus-per-node={num_gpus}",) if job.on_gpu else ()

    def submit_command(
        self, job: Job, script: Path, *, after: str | None = None, tasks: tuple[int, int] | None = None
    ) -> list[str]:
        """Words of sbatch; the script's header has the tasks of an array."""
        dependency = [f"--dependency=afterany:{after}"] if after else []
        return ["sbatch", "--requeue", "--parsable", *dependency, str(script)]

    def template_values(self, job: Job) -> dict[str, object]:
        """The lines of the header, and the log, which the script and srun append to."""
        log = str(job.folder).replace("%", "%%") + f"/slurm-{'%A_%a' if job.array else '%j'}.log"
        return {"options": self._sbatch_options(job, log), "log": log}

    def _sbatch_options(self, job: Job, log: str) -> list[str]:
        with heavy_imports():
            from nemo_run import SlurmExecutor

        parameters: dict[str, Any] = {}
        for option in [*self.resources(job), *job.scheduler_options]:
            name, equals, value = option.removeprefix("--").partition("=")
            parameters[name.replace("-", "_")] = value if equals else True
        executor = SlurmExecutor(
            account=self.account(job) or "",
            partition=self.partition(job),
            time=job.time_limit,
            nodes=job.num_nodes,
            ntasks_per_node=1,
            cpus_per_task=job.config.cpus_per_task,
            array=str(job.array) if job.array else None,
            signal=f"USR1@{job.warning_s}" if job.warning_s is not None else None,
            additional_parameters=parameters,
        )
        executor.job_name = job.script_name
        requested = {name: value for name, value in vars(executor).items() if name in SlurmExecutor.SBATCH_FLAGS}
        requested |= {"output": log, **parameters}
        return [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={shlex.quote(str(value))}")
            for name, value in sorted(requested.items())
            if value not in (None, "", False)
        ]

    def is_listed(self, output: str) -> bool:
        """squeue lists a job for some minutes after its end."""
        return any(state not in _ENDED for state in output.split())

    def allocation(self, environment: Mapping[str, str]) -> Allocation | None:
        """From SLURM_JOB_NODELIST."""
        nodes = environment.get("SLURM_JOB_NODELIST")
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
        return Allocation(tuple(expand_hosts(nodes)), tasks=tasks) if nodes else None

    def time_left(self, environment: Mapping[str, str]) -> float | None:
        """From squeue."""
        job = environment.get("SLURM_JOB_ID")
        if array := environment.get("SLURM_ARRAY_JOB_ID"):
            job = f"{array}_{environment.get('SLURM_ARRAY_TASK_ID')}"  # the last task's id is that of the array
        return parse_time_left(ask(["squeue", "--noheader", "--format=%L", f"--jobs={job}"])) if job else None

    def runner(self, config: LaunchConfig) -> Run:
        """Runs commands here, or on the site's login node over ssh."""
        return _tunnel_runner(config)


def _tunnel_runner(config: LaunchConfig) -> Run:
    with heavy_imports():
        from nemo_run import LocalTunnel, SSHTunnel
    from rich.console import Console

    tunnel: Any = LocalTunnel(job_dir="")
    # The scheduler records the environment of its commands: tokens reach the job by a file instead.
    options: dict[str, Any] = {"env": without_tokens(os.environ), "replace_env": True}
    if config.login_host is not None:
        tunnel, options = (
            SSHTunnel(
                host=config.login_host,
                user=config.login_user or getpass.getuser(),
                port=config.login_port,
                job_dir="",
                identity=config.login_identity,
            ),
            {},
        )
        tunnel.console = Console(stderr=True)  # stdout is for job ids

    def run(words: list[str]) -> str:
        try:
            result = tunnel.run(shlex.join(words), hide=True, warn=True, in_stream=False, **options)
        except (SystemExit, OSError) as error:
            raise PretrainkitError(
                "no connection to the login node", action="check login_host, login_user and login_identity of the site"
            ) from error
        if result.exited:
            said = (result.stderr or result.stdout).strip()
            raise PretrainkitError(f"{words[0]} failed with exit code {result.exited}: {said}", where=words[0])
        return str(result.stdout)

    return run


def parse_time_left(text: str) -> float | None:
    """Seconds, from squeue's %L: '[D-]HH:MM:SS', 'MM:SS', or a word when there is no limit."""
    try:
        return parse_duration(text.strip())
    except ValueError:
        return None


def expand_hosts(text: str) -> list[str]:
    """Host names of a list such as 'n[01-03,7],login-[1-2]x'. Raises RequestError for another form."""
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]+\])+", text)
    if not items or ",".join(items) != text:
        raise RequestError(f"{text!r} is not a list of hosts", needed=_HOST_LIST)
    return [host for item in items for host in _expand(item)]


def _expand(item: str) -> Iterator[str]:
    """All names of one item of a list, which may have several brackets."""
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]+)\](.*)", item)
    if not match:
        yield item
        return
    for numbers in match[2].split(","):
        first, _, last = numbers.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise RequestError(f"{item!r} is not a host of a list", needed=_HOST_LIST)
        for number in range(int(first), int(last or first) + 1):
            for rest in _expand(match[3]):
                yield f"{match[1]}{number:0{len(first)}d}{rest}"


def expand_counts(text: str) -> list[int]:
    """Numbers of a list such as '4(x2),3' (tasks or CPUs by node). Raises RequestError for another form."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if not match:
            raise RequestError(f"{text!r} is not a list of counts", needed="Slurm's form, such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
