"""Rows of a matrix copied by index, and added up by index, in Triton: what sends tokens to experts and back."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048
"""Columns that a program copies or adds up at a time."""


@triton.jit
def _gather(source, index, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_valid = column < columns
    values = tl.load(source + tl.load(index + row) * columns + column, mask=is_valid)
    tl.store(out + row * columns + column, values, mask=is_valid)


@triton.jit
def _sum(  # type: ignore[no-untyped-def]
    source, order, begins, out, columns, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_valid = column < columns
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(tl.load(begins + token), tl.load(begins + token + 1)):
        row = tl.load(order + place)
        total += tl.load(source + row * columns + column, mask=is_valid, other=0.0).to(tl.float32)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=is_valid)


def gather(source: Tensor, index: Tensor) -> Tensor:
    """The rows index [R] of source [n, h]: [R, h]."""
    source, out = source.contiguous(), source.new_empty(len(index), source.size(1))
    if len(index):
        grid, block, warps = _grid(len(index), source.size(1))
        _gather[grid](source, index, out, source.size(1), BLOCK=block, num_warps=warps)
    return out


def sum_by_token(source: Tensor, order: Tensor, begins: Tensor) -> Tensor:
    """For each token the sum [T, h] of rows of source [R, h]: order[begins[t]] to order[begins[t + 1] - 1].

    In fp32 inside.
    """
    tokens, source = len(begins) - 1, source.contiguous()
    out = source.new_empty(tokens, source.size(1))
    if tokens:
        grid, block, warps = _grid(tokens, source.size(1))
        _sum[grid](source, order, begins, out, source.size(1), BLOCK=block, num_warps=warps)
    return out


def _grid(rows: int, columns: int) -> tuple[tuple[int, int], int, int]:
    """Programs, the columns of each, and its number of warps: 16 bytes of bf16 a thread, where it has so many."""
    block = min(MAX_BLOCK, triton.next_power_of_2(columns))
    return (rows, triton.cdiv(columns, block)), block, max(1, min(8, block // 256))
