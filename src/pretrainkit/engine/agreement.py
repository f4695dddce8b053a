"""Agreement of all ranks between steps, on the CPU: a collective on the GPU would wait for the GPU's queued work."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed


def all_ranks_any(flag: bool) -> bool:
    """Whether `flag` is set on any rank. All ranks call it together, after torch.distributed was initialised."""
    if torch.distributed.get_world_size() == 1:
        return flag
    flags = torch.tensor([flag], dtype=torch.int32)
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=_cpu_group())
    return bool(flags.item())


@functools.cache
def _cpu_group() -> Any:
    return torch.distributed.new_group(backend="gloo")
