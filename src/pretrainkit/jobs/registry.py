"""The schedulers by name, and what they say about the job that this process runs in."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pretrainkit.jobs.pbs import Pbs
from pretrainkit.jobs.scheduler import Allocation, Scheduler, run_here
from pretrainkit.jobs.sge import GridEngine
from pretrainkit.jobs.slurm import Slurm

SCHEDULERS: dict[str, Scheduler] = {scheduler.name: scheduler for scheduler in (Slurm(), Pbs(), GridEngine())}
"""By the value of --executor."""


def read_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The nodes of the job that this process runs in; None outside of a job."""
    found = (scheduler.allocation(environment) for scheduler in SCHEDULERS.values())
    return next((allocation for allocation in found if allocation), None)


def time_left(environment: Mapping[str, str], timeout_s: float) -> float | None:
    """Seconds until the job that this process runs in is ended; None outside of a job, or without a limit.

    Raises PretrainkitError when the job's scheduler doesn't answer in time.
    """
    run = partial(run_here, timeout_s=timeout_s)
    found = (scheduler.time_left(environment, run) for scheduler in SCHEDULERS.values())
    return next((seconds for seconds in found if seconds is not None), None)
