"""Checks the bytes of the checkpoint that a start loads, before it does: each rank reads a share of the files.

A checkpoint with changed bytes may load and give NaN some steps later, or worse, none. The ranks agree through the
store of torchrun: the process group comes with NeMo's trainer, which is built for the checkpoint that is chosen here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.rendezvous import rendezvous

from pretrainkit.checkpoint import checksums
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import CheckpointError
from pretrainkit.logs import get_logger
from pretrainkit.run.resume_plan import CONTINUE, StartPlan, plan_start
from pretrainkit.run.skipped_samples import SkippedSamples
from pretrainkit.units import format_bytes, format_duration, parse_duration

log = get_logger(__name__)


def intact_plan(run: ResolvedRun, plan: StartPlan, *, rank: int, world_size: int) -> StartPlan:
    """`plan`, or that of the newest checkpoint that has the bytes it was saved with. All ranks call it together.

    Raises CheckpointError if there is none, or if the weights that a run starts from have changed.
    """
    while plan.checkpoint:
        began_s, folder = time.monotonic(), Path(plan.checkpoint)
        parts = checksums.parts_of(folder)
        if not parts:
            return plan
        problem = checksums.first_problem(parts[rank::world_size], threads=_THREADS)
        if world_size > 1:
            problem = _first_of_ranks(folder.name, problem, world_size, timeout=run.config.training.save_timeout)
        if not problem:
            if rank == 0:
                size = format_bytes(sum(part.num_bytes for part in parts))
                log.info("checked the checksums of %s in %s", size, format_duration(time.monotonic() - began_s))
            return plan
        if plan.mode != CONTINUE:
            raise CheckpointError(problem, action="restore it from a backup, or start from another", where=str(folder))
        plan = plan_start(run, {**plan.damaged, folder.name: problem})
    return plan


def with_skipped_of_first_rank(plan: StartPlan, *, rank: int, world_size: int) -> StartPlan:
    """The plan with the first rank's skipped samples: after a rollback another node may still see the file before."""
    if world_size == 1:
        return plan
    if rank == 0:
        _store().set("skipped samples", json.dumps([plan.skipped.ranges, plan.skipped.num_rollbacks]))
    ranges, num_rollbacks = json.loads(_store().get("skipped samples"))
    skipped = SkippedSamples(tuple((first, last) for first, last in ranges), num_rollbacks)
    return dataclasses.replace(plan, skipped=skipped)


_THREADS = 2
"""Files that a rank reads at once: one thread sums 4 GB/s and more, and a node has many ranks."""


def _first_of_ranks(name: str, problem: str, world_size: int, *, timeout: str) -> str:
    """The problem of some rank that has one, the same on all; empty if none has. `name` is of what is checked."""
    store = _store()
    found, number, all_done = (f"{name} {key}" for key in ("problem", "ranks", "done"))
    if problem:
        store.set(found, problem)
    if store.add(number, 1) == world_size:
        store.set(all_done, "1")
    store.wait([all_done], timedelta(seconds=parse_duration(timeout)))
    return store.get(found).decode() if store.check([found]) else ""


@functools.cache
def _store() -> Any:
    """The store of torchrun, or of rank 0, which keeps it for the process group."""
    store, _, _ = next(rendezvous("env://"))
    return store
