"""What ranks agree on between steps, on the CPU: asking the GPU would make each rank wait for all that its GPU does."""

from __future__ import annotations

import torch
import torch.distributed


class Agreement:
    """A meeting of all ranks. Made on all of them together, after torch.distributed was initialised."""

    def __init__(self) -> None:
        world_size = torch.distributed.get_world_size()
        self._group = torch.distributed.new_group(backend="gloo") if world_size > 1 else None

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set on any rank. Called on all ranks, with as many flags."""
        if self._group is None:
            return flags
        met = torch.tensor(flags, dtype=torch.int32)
        torch.distributed.all_reduce(met, op=torch.distributed.ReduceOp.MAX, group=self._group)
        return tuple(map(bool, met.tolist()))
