"""Slurm. NeMo-Run's SlurmExecutor holds what a job requests.

NeMo-Run's own script and experiments aren't used: they need accounting, and put paths, variables and arguments
unquoted into commands. Here templates/slurm.sh.j2 is the script.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrainkit.config.launch import DEFAULT_SLURM_ACCOUNT, DEFAULT_SLURM_PARTITION
from pretrainkit.errors import RequestError
from pretrainkit.imports import heavy_imports
from pretrainkit.jobs.job import Job
from pretrainkit.jobs.scheduler import Allocation, Run, Scheduler
from pretrainkit.units import parse_duration

_ENDED = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED"),
    *("BOOT_FAIL", "DEADLINE", "SPECIAL_EXIT", "REVOKED"),
)


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

    def submit_command(self, job: Job, script: Path, after: str | None, tasks: tuple[int, int] | None) -> list[str]:
        """Words of sbatch; the script's header has the tasks of an array."""
        dependency = [f"--dependency=afterany:{after}"] if after else []
        return ["sbatch", "--requeue", "--parsable", *dependency, str(script)]

    def log(self, job: Job) -> str:
        """The log in sbatch's form; the script and srun append to it."""
        return str(job.folder).replace("%", "%%") + f"/slurm-{'%A_%a' if job.array else '%j'}.log"

    def header(self, job: Job) -> list[str]:
        """The options of sbatch in the script."""
        with heavy_imports("torch"):  # it would be imported for the names of its dtypes
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
        )
        executor.job_name = job.script_name
        requested = {name: value for name, value in vars(executor).items() if name in SlurmExecutor.SBATCH_FLAGS}
        requested |= {"output": self.log(job), **parameters}
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
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")  # such as '4(x2),3'
        most = max(map(int, re.findall(r"(?:^|,)(\d+)", tasks)))
        return Allocation(tuple(expand_hosts(nodes)), tasks_per_node=most) if nodes else None

    def time_left(self, environment: Mapping[str, str], run: Run) -> float | None:
        """From squeue."""
        job = environment.get("SLURM_JOB_ID")
        if array := environment.get("SLURM_ARRAY_JOB_ID"):
            job = f"{array}_{environment.get('SLURM_ARRAY_TASK_ID')}"  # the last task's id is that of the array
        return parse_time_left(run(["squeue", "--noheader", "--format=%L", f"--jobs={job}"])) if job else None


def parse_time_left(text: str) -> float | None:
    """Seconds, from squeue's %L: '[D-]HH:MM:SS', 'MM:SS', or a word when there is no limit."""
    try:
        return parse_duration(text.strip())
    except ValueError:
        return None


def expand_hosts(text: str) -> list[str]:
    """Host names of a list such as 'n[01-03,7],login-[1-2]x'. Raises RequestError for another form."""
    items = re.findall(r"(?:[^,\[\]]|\[[^\[\]]+\])+", text)
    try:
        if items and ",".join(items) == text:
            # Split at brackets, an item is names and lists of numbers in turn.
            parts = [re.split(r"\[(.*?)\]", item) for item in items]
            choices = [[_numbers(part) if at % 2 else [part] for at, part in enumerate(item)] for item in parts]
            return ["".join(host) for item in choices for host in itertools.product(*item)]
    except ValueError:
        pass
    raise RequestError(f"{text!r} is not a list of hosts", needed="Slurm's form, such as n[01-03,7]")


def _numbers(text: str) -> list[str]:
    """The numbers of '01-03,7', each with the digits of its range's first one. Raises ValueError."""
    ranges = [item.partition("-") for item in text.split(",")]
    return [f"{n:0{len(low)}d}" for low, _, high in ranges for n in range(int(low), int(high or low) + 1)]
