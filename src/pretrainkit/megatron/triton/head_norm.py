"""RMSNorm of short rows in Triton, as those of query and key heads: a program has several rows at a time."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096
"""Of a program's tile of rows and columns."""
PROGRAMS = 8
"""For each multiprocessor, of the backward kernel, whose programs sum the weight's gradient over their rows."""


@triton.jit
def _normalize(  # type: ignore[no-untyped-def]
    hidden, weight, normed, scales, rows, columns, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_valid = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    values = tl.load(hidden + place, mask=is_valid, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / columns + eps)
    factors = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    out = values * scale[:, None] * factors[None, :]
    tl.store(normed + place, out.to(normed.dtype.element_ty), mask=is_valid)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    scales,
    gradient,
    of_hidden,
    of_weight,
    rows,
    columns,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    factors = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        is_valid = (row < rows)[:, None] & (column < columns)[None, :]
        place = row[:, None] * columns + column[None, :]
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        unit = tl.load(hidden + place, mask=is_valid, other=0.0).to(tl.float32) * scale[:, None]
        above = tl.load(gradient + place, mask=is_valid, other=0.0).to(tl.float32)
        total += tl.sum(above * unit, axis=0)
        above *= factors[None, :]
        mean = tl.sum(above * unit, axis=1) / columns
        out = (above - unit * mean[:, None]) * scale[:, None]
        tl.store(of_hidden + place, out.to(of_hidden.dtype.element_ty), mask=is_valid)
    tl.store(of_weight + program * columns + column, total, mask=column < columns)


class HeadNorm(torch.autograd.Function):
    """Autograd function of `head_norm`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        hidden = hidden.contiguous()
        columns = hidden.size(-1)
        rows, normed = hidden.numel() // columns, torch.empty_like(hidden)
        scales = hidden.new_empty(rows, dtype=torch.float32)
        sizes = _sizes(columns)
        programs = triton.cdiv(rows, sizes["ROWS"])
        _normalize[(programs,)](hidden, weight, normed, scales, rows, columns, eps, **sizes)
        ctx.save_for_backward(hidden, weight, scales)
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, scales = ctx.saved_tensors
        columns, rows, sizes = hidden.size(-1), scales.numel(), _sizes(hidden.size(-1))
        multiprocessors = torch.cuda.get_device_properties(hidden.device).multi_processor_count if hidden.is_cuda else 2
        programs = min(triton.cdiv(rows, sizes["ROWS"]), PROGRAMS * multiprocessors)
        of_hidden, of_weight = torch.empty_like(hidden), hidden.new_empty((programs, columns), dtype=torch.float32)
        tensors = hidden, weight, scales, gradient.contiguous(), of_hidden, of_weight
        _gradients[(programs,)](*tensors, rows, columns, **sizes)
        return of_hidden, of_weight.sum(0).to(weight.dtype), None


def _sizes(columns: int) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    return {"ROWS": max(1, ELEMENTS // block), "BLOCK": block, "num_warps": 4}


def head_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """hidden [..., d] over its last dimension, in fp32 inside, times weight [d]."""
    return HeadNorm.apply(hidden, weight, eps)
