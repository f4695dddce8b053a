"""The FP8 copies of a weight, made once a step and used by all its microbatches.

A weight changes through the optimizer, whose parameters may arrive just before a layer's forward pass, through loading,
and through nothing else during a step. So the engine calls `expire` before each step and each evaluation, and a copy
is made again when its layer runs next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrainkit.megatron.fp8.quantize import FORWARD, Fp8Tensor, Scaling, transpose

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
        if self._made_in == _epoch:
            return
        exists = self._made_in >= 0
        self.rows = self._scaling.cast(weight.detach(), FORWARD, into=self.rows if exists else None)
        self.columns = transpose(self.rows, into=self.columns if exists else None)
        self._made_in = _epoch
