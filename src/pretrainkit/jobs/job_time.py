"""How long the job that this process runs in may still take, as its scheduler says."""

from __future__ import annotations

import re
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from datetime import datetime

from pretrainkit.units import parse_duration

_TIMEOUT_S = 20


def time_left(environment: Mapping[str, str]) -> float | None:
    """Seconds until the scheduler ends this job; None outside a job, without a limit, or when it doesn't say."""
    if job := environment.get("SLURM_JOB_ID"):
        if array := environment.get("SLURM_ARRAY_JOB_ID"):
            job = f"{array}_{environment.get('SLURM_ARRAY_TASK_ID')}"  # the last task's id is the whole array's
        return parse_squeue(_output(["squeue", "--noheader", "--format=%L", f"--jobs={job}"]))
    if job := environment.get("PBS_JOBID"):
        return parse_pbs(_output(["qstat", "-f", job]))
    if "SGE_ROOT" in environment and (job := environment.get("JOB_ID")):
        running = _output(["qstat", "-s", "r", "-u", "*", "-xml"])
        start_s = parse_grid_engine_start(running, job, environment.get("SGE_TASK_ID", ""))
        limit_s = parse_grid_engine_limit(_output(["qstat", "-j", job]))
        return start_s + limit_s - time.time() if start_s and limit_s else None
    return None


def parse_squeue(text: str) -> float | None:
    """Slurm's %L: '[D-]HH:MM:SS', 'MM:SS', or a word when there is no limit."""
    try:
        return parse_duration(text.strip())
    except ValueError:
        return None


def parse_pbs(text: str) -> float | None:
    """From `qstat -f`: the limit less the time used."""
    limit = re.search(r"Resource_List\.walltime = (\S+)", text)
    if not limit:
        return None
    used = re.search(r"resources_used\.walltime = (\S+)", text)
    try:
        return parse_duration(limit[1]) - (parse_duration(used[1]) if used else 0)
    except ValueError:
        return None


def parse_grid_engine_limit(text: str) -> float | None:
    """h_rt in seconds, from `qstat -j`."""
    limit = re.search(r"^hard[ _]resource_list:.*\bh_rt=(\d+)", text, re.MULTILINE)
    return float(limit[1]) if limit else None


def parse_grid_engine_start(text: str, job: str, task: str) -> float | None:
    """When a job, or a task of an array, was started, in seconds since 1970: from `qstat -xml`, in local time."""
    try:
        jobs = ElementTree.fromstring(text).iter("job_list")
    except ElementTree.ParseError:
        return None
    for item in jobs:
        if item.findtext("JB_job_number") != job or item.findtext("tasks", task) != task:
            continue
        try:
            return datetime.fromisoformat((item.findtext("JAT_start_time") or "").partition(".")[0]).timestamp()
        except ValueError:
            return None
    return None


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
