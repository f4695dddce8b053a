"""NaN and infinities in the tensors that a conversion writes, and what the padding rows hold that it removes.

Bytes are checked while they are copied, at the speed of memory: by integer comparisons, since in every floating-point
format a value that isn't finite has the largest exponent. Exact counts are made only of tensors that have such values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_INFINITY = {
    torch.float64: (np.int64, 0x7FF0_0000_0000_0000),
    torch.float32: (np.int32, 0x7F80_0000),
    torch.bfloat16: (np.int16, 0x7F80),
    torch.float16: (np.int16, 0x7C00),
    torch.float8_e5m2: (np.int8, 0x7C),
    torch.float8_e4m3fn: (np.int8, 0x7F),
}
"""By dtype: the integer of its width, and the bits of the smallest positive value that isn't finite."""
_COUNTED_ELEMENTS = 2**22
"""Elements that are counted at a time, so that memory stays flat."""


@dataclass
class Watch:
    """Whether anything that was written isn't finite."""

    found: bool = False


def is_finite(data: memoryview, dtype: torch.dtype) -> bool:
    """Whether all elements of a buffer are finite; other types than floating-point ones always are."""
    if dtype not in _INFINITY:
        return True
    integer, infinity = _INFINITY[dtype]
    values = np.frombuffer(data, integer)
    sign = 1 << (8 * dtype.itemsize - 1)
    # Seen without a sign, negative values are the largest, and of these the ones that aren't finite.
    return int(values.max()) < infinity and int(values.view(f"u{dtype.itemsize}").max()) < infinity + sign


def describe(tensor: Tensor) -> str:
    """How many elements are NaN and infinite, such as '3 NaN, 1 infinite'; empty where all are finite."""
    counts = {"NaN": 0, "infinite": 0}
    for part in tensor.reshape(-1).split(_COUNTED_ELEMENTS):
        counts["NaN"] += int(part.isnan().sum())
        counts["infinite"] += int(part.isinf().sum())
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def describe_padding(rows: Tensor) -> str:
    """What padding rows of a vocabulary hold: nothing to speak of where they are zeros, as they are written here."""
    values = rows.float()
    finite = values[values.isfinite()]
    denormal = int(((finite != 0) & (finite.abs() < torch.finfo(rows.dtype).tiny)).sum())
    if not values.any():
        return "zeros"
    found = [f"{int(values.any(dim=1).sum())} not zero"]
    found += [f"largest value {float(finite.abs().max()):.2g}"] if len(finite) else []
    found += [f"{denormal} denormal"] if denormal else []
    return ", ".join(found)
