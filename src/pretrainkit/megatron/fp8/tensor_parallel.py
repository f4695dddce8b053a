"""How FP8 matrices and gradients travel between tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from pretrainkit.megatron.fp8.quantize import Fp8Tensor


@dataclass(frozen=True)
class TensorParallel:
    """A layer's ranks. Methods start what they name and give a function that waits for its result."""

    group: ProcessGroup
    sequence: bool
    """Sequence parallelism: between the layers each rank has the rows of its part of the sequence."""

    @property
    def gathers(self) -> ProcessGroup | None:
        """The group, if rows are gathered from its ranks."""
        return self.group if self.sequence and self.group.size() > 1 else None

    def gather(self, part: Fp8Tensor) -> Callable[[], Fp8Tensor]:
        """All ranks' rows; without sequence parallelism this rank has them."""
        if not self.gathers:
            return lambda: part
        # NCCL and gloo know bytes, not FP8.
        values = self.gather_rows(part.values.view(torch.uint8))
        scales = self.gather_rows(part.scales) if part.scales.numel() == len(part.values) else lambda: part.scales
        return lambda: Fp8Tensor(values().view(part.values.dtype), scales())

    def gather_rows(self, part: Tensor) -> Callable[[], Tensor]:
        """The same for a tensor."""
        if not self.gathers:
            return lambda: part
        whole = part.new_empty((self.group.size() * part.shape[0], *part.shape[1:]))
        return _waited(distributed.all_gather_into_tensor(whole, part, self.group, async_op=True), whole)

    def reduce(self, partial: Tensor) -> Callable[[], Tensor]:
        """The sum over ranks [rows, n], or with sequence parallelism this rank's rows of it."""
        if self.group.size() == 1:
            return lambda: partial
        if not self.sequence:
            return _waited(distributed.all_reduce(partial, group=self.group, async_op=True), partial)
        part = partial.new_empty((partial.shape[0] // self.group.size(), *partial.shape[1:]))
        return _waited(distributed.reduce_scatter_tensor(part, partial, group=self.group, async_op=True), part)


def _waited(work: distributed.Work | None, result: Tensor) -> Callable[[], Tensor]:
    def wait() -> Tensor:
        if work:
            work.wait()
        return result

    return wait
