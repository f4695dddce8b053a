"""Agreement of all ranks between steps, on the CPU: a collective on the GPU would wait for the GPU's queued work."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from megatron.core import parallel_state


def all_ranks_any(flag: bool) -> bool:
    """Whether `flag` is set on any rank. All ranks call it together, after torch.distributed was initialised."""
    return bool(share_number(int(flag)))


def share_number(number: int) -> int:
    """The largest of all ranks' numbers. All ranks call it together."""
    if torch.distributed.get_world_size() == 1:
        return number
    numbers = torch.tensor([number], dtype=torch.int64)
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX, group=_cpu_group())
    return int(numbers.item())


COLLECTIVE_MARGIN = timedelta(minutes=5)
"""A collective's error names a rank that waits; the watch over the ranks, which knows better, speaks before it."""


def limit_collectives(limit: timedelta) -> None:
    """Let collectives of all groups fail after `limit` and a margin. All ranks call it together."""
    parallel_state.update_pg_timeout(limit + COLLECTIVE_MARGIN)
    if torch.distributed.get_world_size() > 1:
        torch.distributed.distributed_c10d._set_pg_timeout(limit + COLLECTIVE_MARGIN, _cpu_group())


@functools.cache
def _cpu_group() -> Any:
    return torch.distributed.new_group(backend="gloo")
