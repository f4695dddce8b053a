"""PBS: OpenPBS and PBS Professional."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from pretrainkit.jobs.job import Job
from pretrainkit.jobs.scheduler import Run, Scheduler
from pretrainkit.units import parse_duration

SHELL = "shell.sh"
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+@=-]+")


class Pbs(Scheduler):
    """OpenPBS and PBS Professional."""

    name = "pbs"
    job_id = array_job_id = '"${PBS_JOBID%%[.[]*}"'
    start = '"${PBS_JOBID%%[.[]*}_$(date +%s)"'
    array_index = '"$PBS_ARRAY_INDEX"'
    is_first_start = '[ -z "${PRETRAINKIT_CONTINUES:-}" ]'
    host_file = "PBS_NODEFILE"
    account_option = "-A"
    takes_arrays_of_one = False
    requeues_in_place = False
    job_id_pattern = r"(\d+(?:\[\])?)(?:\..*)?"  # an array's id ends in []: without it qstat and qdel know no such job
    query = ("qstat",)
    history = ("qstat", "-x", "-f")
    history_facts = r"Exit_status = .*|comment = .*"

    def default_resources(self, job: Job) -> tuple[str, ...]:
        """One chunk for each node. Without a place PBS puts as many chunks on a node as it can hold."""
        cpus = ":ncpus={num_cpus}" if job.config.cpus_per_task else ""
        select = f"select={{num_nodes}}{cpus}" + (":ngpus={num_gpus}" if job.on_gpu else "")
        return (select, "place=scatter") if job.num_nodes > 1 else (select,)

    def submit_command(self, job: Job, script: Path, after: str | None, tasks: tuple[int, int] | None) -> list[str]:
        """Words of qsub."""
        words = ["qsub", *self.account_words(job), "-o", scheduler_log(job)]
        words += ["-W", f"depend=afterany:{after}"] if after else []
        if tasks:
            limit = f"%{job.array.at_once}" if job.array and job.array.at_once else ""
            words += ["-J", f"{tasks[0]}-{tasks[1]}{limit}"]
        return [*words, str(script)]

    def shell(self, job: Job) -> Path:
        """What PBS starts as the login shell of a job; qsub can't have every path."""
        return job.folder / SHELL if _PLAIN_PATH.fullmatch(str(job.folder)) else Path("/bin/bash")

    def requeue(self, job: Job, script: Path) -> str:
        """A new qsub: PBS has no command that requeues a running job of one's own."""
        words = ["qsub", *self.account_words(job), "-v", "PRETRAINKIT_CONTINUES=1", "-o", "/dev/null"]
        # PBS takes up to half a minute to see that this job has ended.
        after = '-W depend=afterany:"$PBS_JOBID"'
        return f'{shlex.join(words)} {after} {shlex.quote(str(script))} >> "$folder/chain" || echo "qsub failed" >&2'

    def time_left(self, environment: Mapping[str, str], run: Run) -> float | None:
        """From qstat."""
        job = environment.get("PBS_JOBID")
        return parse_time_left(run(["qstat", "-f", job])) if job else None


def parse_time_left(text: str) -> float | None:
    """Seconds, from the output of `qstat -f`: the limit less the time used."""
    limit = re.search(r"Resource_List\.walltime = (\S+)", text)
    used = re.search(r"resources_used\.walltime = (\S+)", text)
    try:
        return parse_duration(limit[1]) - (parse_duration(used[1]) if used else 0) if limit else None
    except ValueError:
        return None


def scheduler_log(job: Job) -> str:
    """File for what PBS or Grid Engine itself prints before and after the script, which writes its own log.

    qsub expands variables in this path, so a path with special characters is replaced by /dev/null.
    """
    return str(job.folder / "scheduler.log") if _PLAIN_PATH.fullmatch(str(job.folder)) else "/dev/null"
