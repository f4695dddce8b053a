"""Grid Engine: Altair, Univa, Son of Grid Engine."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from pretrainkit.jobs.job import Job
from pretrainkit.jobs.pbs import scheduler_log
from pretrainkit.jobs.scheduler import Run, Scheduler


class GridEngine(Scheduler):
    """Grid Engine, whose array tasks count from 1."""

    name = "sge"
    job_id = array_job_id = '"$JOB_ID"'
    start = '"${JOB_ID}_$(date +%s)"'
    array_index = '"$((SGE_TASK_ID - 1))"'
    is_first_start = '[ "${RESTARTED:-0}" = 0 ]'
    host_file = "PE_HOSTFILE"
    account_option = "-P"
    job_id_pattern = r"(?:Your job(?:-array)? )?(\d+)(?:\..*|[ (].*)?"
    cancel_signals = "TERM USR2"  # -notify sends the latter, before it kills
    requeue_line = "code=99 # Grid Engine starts a job with this exit code again"
    query = ("qstat", "-j")
    history = ("qacct", "-j")
    history_facts = r"^(?:failed|exit_status|maxvmem) +.*$"

    def submit_command(self, job: Job, script: Path, after: str | None, tasks: tuple[int, int] | None) -> list[str]:
        """Words of qsub."""
        words = ["qsub", *self.account_words(job), "-terse", "-o", scheduler_log(job)]
        words += ["-hold_jid", after] if after else []
        if tasks:
            words += ["-t", f"{tasks[0] + 1}-{tasks[1] + 1}"]
            words += ["-tc", str(job.array.at_once)] if job.array and job.array.at_once else []
        return [*words, str(script)]

    def time_left(self, environment: Mapping[str, str], run: Run) -> float | None:
        """From h_rt and the time at which the job, or the array's task, was started."""
        job = environment.get("JOB_ID")
        if "SGE_ROOT" not in environment or not job:
            return None
        running = run(["qstat", "-s", "r", "-u", "*", "-xml"])
        start_s = parse_start(running, job, environment.get("SGE_TASK_ID", ""))
        limit_s = parse_limit(run(["qstat", "-j", job]))
        return start_s + limit_s - time.time() if start_s and limit_s else None


def parse_limit(text: str) -> float | None:
    """h_rt in seconds, from the output of `qstat -j`."""
    limit = re.search(r"^hard[ _]resource_list:.*\bh_rt=(\d+)", text, re.MULTILINE)
    return float(limit[1]) if limit else None


def parse_start(text: str, job: str, task: str) -> float | None:
    """When a job or an array's task was started, in seconds since 1970, from `qstat -xml`, which has local time."""
    with suppress(ElementTree.ParseError, ValueError):
        for item in ElementTree.fromstring(text).iter("job_list"):
            if item.findtext("JB_job_number") == job and item.findtext("tasks", task) == task:
                return datetime.fromisoformat((item.findtext("JAT_start_time") or "").partition(".")[0]).timestamp()
    return None


def visible_gpus(environment: Mapping[str, str]) -> str | None:
    """CUDA_VISIBLE_DEVICES of a job that got its GPUs from a resource map: SGE_HGR_gpu='GPU2 GPU3'."""
    for name, value in environment.items():
        if name.startswith("SGE_HGR_") and "gpu" in name.lower():
            return ",".join(re.findall(r"\d+(?=\s|$)", value)) or None
    return None
