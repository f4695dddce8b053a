"""The FP8 copies of a weight, made once a step and used by all its microbatches.

A weight changes through the optimizer, whose parameters may arrive just before a layer's forward pass, through loading,
and through nothing else during a step. So the engine calls `expire` before each step and each evaluation, and a copy
is made again when its layer runs next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrainkit.megatron.fp8.quantize import FORWARD, Fp8Tensor, Scaling, transpose

MAX_TRANSPOSED = 2**27
"""Elements of experts' matrices that are transposed at a time, in 256 MiB of bf16."""
_epoch = 0


def expire() -> None:
    """Say that weights may have changed: all FP8 copies are made again before they are used."""
    global _epoch
    _epoch += 1


class Fp8Weight:
    """A weight [n, k] in FP8, as it is and transposed, at addresses that stay the same: CUDA graphs read them."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._made_in = -1
        self.rows: Fp8Tensor
        """[n, k], for the product of the forward pass."""
        self.columns: Fp8Tensor
        """[k, n], for the gradient of the input."""

    @torch.no_grad()
    def update(self, weight: Tensor) -> None:
        """Make the copies of `weight`, unless they were made since the last `expire`."""
        if self._made_in != _epoch:
            self._make(weight.detach(), exists=self._made_in >= 0)
            self._made_in = _epoch

    def _make(self, weight: Tensor, *, exists: bool) -> None:
        self.rows = self._scaling.cast(weight, FORWARD, into=self.rows if exists else None)
        self.columns = transpose(self.rows, into=self.columns if exists else None)


class Fp8ExpertWeight(Fp8Weight):
    """The matrices [e, n, k] of a layer's experts: `rows` is [e n, k], `columns` is [e k, n], each with its scales.

    Both are cast from the weight. A transposed copy of `rows` would be cheaper, with one scale for each expert.
    """

    def _make(self, weight: Tensor, *, exists: bool) -> None:
        experts, outputs, inputs = weight.shape
        self.rows = self._scaling.cast(weight.flatten(0, 1), FORWARD, into=self.rows if exists else None)
        if not exists:
            values = weight.new_empty((experts * inputs, outputs), dtype=FORWARD)
            self.columns = Fp8Tensor(values, weight.new_empty(experts * inputs, dtype=torch.float32))
        count = max(1, MAX_TRANSPOSED // weight[0].numel())
        into = zip(*(part.split(count * inputs) for part in (self.columns.values, self.columns.scales)), strict=True)
        for matrices, memory in zip(weight.split(count), into, strict=True):
            self._scaling.cast(matrices.mT.contiguous().flatten(0, 1), FORWARD, into=Fp8Tensor(*memory))
