"""What the casts of a layer note: scales, and values lost to underflow, of the last microbatch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrainkit.megatron.fp8.quantize import COUNTED


@dataclass(frozen=True)
class Range:
    """Of one kind of tensor, over layers."""

    smallest_scale: float
    """As a power of two: rows of zeros aren't counted."""
    largest_scale: float
    underflow: float
    """Largest share of a layer's values that became zero though they weren't."""
    not_finite: int
    """Rows with a NaN or an infinite value."""


class Stats:
    """Buffers that a layer's casts write, by the kind of tensor. They keep their addresses: CUDA graphs write them."""

    def __init__(self) -> None:
        self._buffers: dict[str, tuple[Tensor, int]] = {}

    def of(self, kind: str, like: Tensor) -> Tensor:
        """The buffer [2, rows] for a tensor [rows, columns] of this kind."""
        rows, columns = like.shape
        found = self._buffers.get(kind)
        if found is None or found[0].shape[1] != rows:
            found = self._buffers[kind] = torch.zeros((2, rows), device=like.device), columns
        return found[0]

    def read(self) -> dict[str, Range]:
        """Waits for the GPU."""
        return {kind: _range(*buffer) for kind, buffer in self._buffers.items()}


def _range(buffer: Tensor, columns: int) -> Range:
    scales, lost = buffer.cpu()
    finite = scales[scales.isfinite() & (scales > 2.0**-100)]  # what a row of zeros has
    low, high = (math.log2(finite.min()), math.log2(finite.max())) if len(finite) else (0.0, 0.0)
    counted = lost[::COUNTED]
    return Range(low, high, counted.sum().item() / (len(counted) * columns), int((~scales.isfinite()).sum()))


def merged(found: Iterable[dict[str, Range]]) -> dict[str, Range]:
    """The ranges of several layers as one for each kind."""
    by_kind: dict[str, list[Range]] = {}
    for ranges in found:
        for kind, of_layer in ranges.items():
            by_kind.setdefault(kind, []).append(of_layer)
    return {
        kind: Range(
            min(each.smallest_scale for each in ranges),
            max(each.largest_scale for each in ranges),
            max(each.underflow for each in ranges),
            sum(each.not_finite for each in ranges),
        )
        for kind, ranges in by_kind.items()
    }
