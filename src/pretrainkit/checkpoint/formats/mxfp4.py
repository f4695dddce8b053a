"""Weights in MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss has its experts: read into bf16, which is exact.

A matrix [out, in] is two tensors of bytes: blocks [out, in / 32, 16], each byte two values, the lower four bits first,
and scales [out, in / 32]. A value is its E2M1 number times 2^(scale - 127): it has at most two significant bits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pretrainkit.checkpoint.lazy_tensor import LazyTensor, StoredTensor

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of a matrix's tensors."""
BLOCK_VALUES = 32

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16)
_BYTES = torch.arange(256)
_PAIRS = torch.stack((_VALUES[_BYTES % 16], _VALUES[_BYTES // 16]), 1).view(torch.int32).flatten().numpy()
"""[256]: the two values of a byte, as one number of 32 bits."""
_POWERS = torch.ldexp(torch.ones(256, dtype=torch.float64), _BYTES - 127).to(torch.bfloat16)
_POWERS[255] = torch.nan


def dequantized(blocks: StoredTensor, scales: StoredTensor) -> LazyTensor:
    """The matrix [out, in] of blocks [out, in / 32, 16] and scales [out, in / 32], computed where it is read."""

    def rows(first: int, count: int) -> Tensor:
        values = np.take(_PAIRS, blocks.narrow(0, first, count).read().numpy())  # [count, in / 32, 16]
        powers = _POWERS[scales.narrow(0, first, count).read().long()]
        return (torch.from_numpy(values).view(torch.bfloat16) * powers[..., None]).flatten(1)

    return LazyTensor.computed((blocks.shape[0], blocks.shape[1] * BLOCK_VALUES), torch.bfloat16, rows)
