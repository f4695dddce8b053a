"""FP8 by Triton: casts with a scale for each row, fused with the norm, SwiGLU and its gradient; transposed copies.

A scale is the smallest power of two for which the largest absolute value of a row divided by it is at most the format's
largest number. So scaling rounds nothing, and a transposed copy with other scales is made from the FP8 values. NaN and
infinite values make the row's scale NaN: e4m3 has no infinity, and its conversion saturates.

Each kernel also counts the values that become zero though they weren't (underflow), in every 16th row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_LIMIT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""Both formats' largest number is 1.75 x 2^this: 448 and 57344."""


TRANSPOSE_BLOCK = (128, 128, 4)
"""Rows, columns and warps of a program."""


@triton.jit
def _bits(values):  # type: ignore[no-untyped-def]
    """Absolute fp32 values as integers of the same order, in which NaN is the largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(bits, LOG2_LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale for a largest absolute value given as `_bits`, and its inverse."""
    exponent = (bits >> 23) - 127 - LOG2_LIMIT + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -100), 100)
    is_finite = bits < 0x7F800000
    scale = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, scale, float("nan")), inverse


@triton.jit
def _store(values, inverse, into, offsets, is_valid, LOG2_LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store values x inverse in FP8; gives where values become zero though they weren't."""
    scaled = values * inverse
    tl.store(into + offsets, scaled.to(into.dtype.element_ty), mask=is_valid)
    # Half of the smallest number, which is rounded to the even one of its neighbours, zero.
    half = 2.0**-10 if LOG2_LIMIT == 8 else 2.0**-17
    return (values != 0.0) & (tl.abs(scaled) <= half)


@triton.jit
def _note(row, rows, scale, underflows, stats):  # type: ignore[no-untyped-def]
    tl.store(stats + row, scale)
    if row % 16 == 0:  # counting in all rows takes a third of a cast's time
        tl.store(stats + rows + row, tl.sum(underflows.to(tl.int32), 0).to(tl.float32))


@triton.jit
def _cast(  # type: ignore[no-untyped-def]
    values, out, scales, stats, rows, columns, BLOCK: tl.constexpr, LOG2_LIMIT: tl.constexpr, HAS_STATS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_valid = column < columns
    found = tl.load(values + row * columns + column, mask=is_valid, other=0.0).to(tl.float32)
    scale, inverse = _scale_of(tl.max(_bits(found), 0), LOG2_LIMIT)
    underflows = _store(found, inverse, out, row * columns + column, is_valid, LOG2_LIMIT)
    tl.store(scales + row, scale)
    if HAS_STATS:
        _note(row, rows, scale, underflows, stats)


@triton.jit
def _normalize(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    out,
    scales,
    stats,
    exact,
    reciprocals,
    rows,
    columns,
    eps,
    BLOCK: tl.constexpr,
    HAS_STATS: tl.constexpr,
    HAS_EXACT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_valid = column < columns
    found = tl.load(hidden + row * columns + column, mask=is_valid, other=0.0).to(tl.float32)
    reciprocal = 1.0 / tl.sqrt(tl.sum(found * found) / columns + eps)
    found = found * reciprocal * tl.load(weight + column, mask=is_valid, other=0.0).to(tl.float32)
    scale, inverse = _scale_of(tl.max(_bits(found), 0), 8)
    underflows = _store(found, inverse, out, row * columns + column, is_valid, 8)
    tl.store(scales + row, scale)
    if HAS_STATS:
        _note(row, rows, scale, underflows, stats)
    tl.store(reciprocals + row, reciprocal)
    if HAS_EXACT:
        tl.store(exact + row * columns + column, found.to(exact.dtype.element_ty), mask=is_valid)


@triton.jit
def _swiglu(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    scales,
    stats,
    exact,
    rows,
    half,
    BLOCK: tl.constexpr,
    HAS_STATS: tl.constexpr,
    HAS_EXACT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_valid = column < half
    gate = tl.load(gate_up + row * 2 * half + column, mask=is_valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * half + half + column, mask=is_valid, other=0.0).to(tl.float32)
    found = gate * tl.sigmoid(gate) * up
    scale, inverse = _scale_of(tl.max(_bits(found), 0), 8)
    underflows = _store(found, inverse, out, row * half + column, is_valid, 8)
    tl.store(scales + row, scale)
    if HAS_STATS:
        _note(row, rows, scale, underflows, stats)
    if HAS_EXACT:
        tl.store(exact + row * half + column, found.to(exact.dtype.element_ty), mask=is_valid)


@triton.jit
def _swiglu_gradient(  # type: ignore[no-untyped-def]
    gradient,
    gate_up,
    out,
    scales,
    stats,
    exact,
    rows,
    half,
    BLOCK: tl.constexpr,
    LOG2_LIMIT: tl.constexpr,
    HAS_STATS: tl.constexpr,
    HAS_EXACT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_valid = column < half
    first, second = row * 2 * half + column, row * 2 * half + half + column
    above = tl.load(gradient + row * half + column, mask=is_valid, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + first, mask=is_valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + second, mask=is_valid, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    of_up = above * silu
    of_gate = above * up * (silu * (1.0 - sigmoid) + sigmoid)
    scale, inverse = _scale_of(tl.max(tl.maximum(_bits(of_up), _bits(of_gate)), 0), LOG2_LIMIT)
    underflows = _store(of_gate, inverse, out, first, is_valid, LOG2_LIMIT).to(tl.int32)
    underflows += _store(of_up, inverse, out, second, is_valid, LOG2_LIMIT).to(tl.int32)
    tl.store(scales + row, scale)
    if HAS_STATS:
        _note(row, rows, scale, underflows, stats)
    if HAS_EXACT:
        tl.store(exact + first, of_gate.to(exact.dtype.element_ty), mask=is_valid)
        tl.store(exact + second, of_up.to(exact.dtype.element_ty), mask=is_valid)


@triton.jit
def _largest_bits(values, largest, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(values + offset, mask=offset < count, other=0.0).to(tl.float32)
    tl.atomic_max(largest, tl.max(_bits(found), 0), sem="relaxed")


@triton.jit
def _cast_by(  # type: ignore[no-untyped-def]
    values,
    largest,
    out,
    scale,
    stats,
    rows,
    columns,
    BLOCK: tl.constexpr,
    LOG2_LIMIT: tl.constexpr,
    HAS_STATS: tl.constexpr,
):
    """Cast with one scale, of the largest bits of the tensor."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_valid = column < columns
    found = tl.load(values + row * columns + column, mask=is_valid, other=0.0).to(tl.float32)
    value, inverse = _scale_of(tl.load(largest), LOG2_LIMIT)
    underflows = _store(found, inverse, out, row * columns + column, is_valid, LOG2_LIMIT)
    tl.store(scale, value)
    if HAS_STATS:
        _note(row, rows, value, underflows, stats)


@triton.jit
def _transpose(  # type: ignore[no-untyped-def]
    values,
    scales,
    out,
    out_scales,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
):
    """values [rows, columns] to `out` [columns, rows], scales of rows to their largest for all columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_valid = (row < rows)[:, None] & (column < columns)[None, :]
    found = tl.load(values + row.to(tl.int64)[:, None] * columns + column[None, :], mask=is_valid, other=0.0)
    if not ONE_SCALE:
        every = tl.arange(0, ALL_ROWS)
        bits = tl.max(_bits(tl.load(scales + every, mask=every < rows, other=0.0)), 0)
        largest = bits.to(tl.float32, bitcast=True)
        ratio = tl.load(scales + row, mask=row < rows, other=0.0) / largest
        found = (found.to(tl.float32) * ratio[:, None]).to(out.dtype.element_ty)
        if tl.program_id(1) == 0:
            tl.store(out_scales + column, tl.zeros((COLUMNS,), tl.float32) + largest, mask=column < columns)
    tl.store(out + column.to(tl.int64)[:, None] * rows + row[None, :], tl.trans(found), mask=tl.trans(is_valid))


def _sizes(columns: int) -> tuple[int, int]:
    """Columns that a program keeps in registers, and its number of warps."""
    block: int = triton.next_power_of_2(columns)
    return block, min(16, max(4, block // 1024))


Pair = tuple[Tensor, Tensor]
"""FP8 values, and scales."""


def cast(values: Tensor, dtype: torch.dtype, stats: Tensor | None = None, into: Pair | None = None) -> Pair:
    """values [rows, columns] in FP8, and the rows' scales [rows]; written to `into` if it is given.

    `stats` [2, rows] gets the scales of the rows and, in every 16th, their numbers of underflows.
    """
    rows, columns = values.shape
    out, scales = into or (torch.empty_like(values, dtype=dtype), values.new_empty(rows, dtype=torch.float32))
    block, warps = _sizes(columns)
    _cast[(rows,)](
        values,
        out,
        scales,
        scales if stats is None else stats,
        rows,
        columns,
        BLOCK=block,
        LOG2_LIMIT=LOG2_LIMIT[dtype],
        HAS_STATS=stats is not None,
        num_warps=warps,
    )
    return out, scales


def cast_by_tensor(
    values: Tensor, largest: Tensor, dtype: torch.dtype, stats: Tensor | None = None, into: Pair | None = None
) -> Pair:
    """values [rows, columns] in FP8, and their one scale [1]; `largest` [1] is `largest_bits` of them."""
    rows, columns = values.shape
    out, scale = into or (torch.empty_like(values, dtype=dtype), values.new_empty(1, dtype=torch.float32))
    block, warps = _sizes(columns)
    _cast_by[(rows,)](
        values,
        largest,
        out,
        scale,
        scale if stats is None else stats,
        rows,
        columns,
        BLOCK=block,
        LOG2_LIMIT=LOG2_LIMIT[dtype],
        HAS_STATS=stats is not None,
        num_warps=warps,
    )
    return out, scale


def largest_bits(values: Tensor) -> Tensor:
    """The largest absolute value as the bits of an fp32, int32 [1]; NaN is larger than infinity."""
    largest = torch.zeros(1, dtype=torch.int32, device=values.device)
    _largest_bits[(triton.cdiv(values.numel(), 8192),)](values, largest, values.numel(), BLOCK=8192, num_warps=8)
    return largest


def normalize(
    hidden: Tensor, weight: Tensor, eps: float, exact: Tensor | None, stats: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The RMSNorm of hidden [rows, columns] in e4m3, the rows' scales, and reciprocals of their root mean squares.

    `exact` [rows, columns] gets it in its own dtype too.
    """
    rows, columns = hidden.shape
    out = torch.empty_like(hidden, dtype=torch.float8_e4m3fn)
    scales, reciprocals = hidden.new_empty((2, rows), dtype=torch.float32)
    block, warps = _sizes(columns)
    _normalize[(rows,)](
        hidden,
        weight,
        out,
        scales,
        scales if stats is None else stats,
        hidden if exact is None else exact,
        reciprocals,
        rows,
        columns,
        eps,
        BLOCK=block,
        HAS_STATS=stats is not None,
        HAS_EXACT=exact is not None,
        num_warps=warps,
    )
    return out, scales, reciprocals


def swiglu(gate_up: Tensor, exact: Tensor | None, stats: Tensor | None) -> Pair:
    """SwiGLU of gate and up [rows, 2 x half] in e4m3 [rows, half], and the rows' scales; `exact` as in `normalize`."""
    rows, half = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, half), dtype=torch.float8_e4m3fn)
    scales = gate_up.new_empty(rows, dtype=torch.float32)
    block = _sizes(half)[0]
    _swiglu[(rows,)](
        gate_up,
        out,
        scales,
        scales if stats is None else stats,
        gate_up if exact is None else exact,
        rows,
        half,
        BLOCK=block,
        HAS_STATS=stats is not None,
        HAS_EXACT=exact is not None,
        num_warps=_sizes(2 * half)[1],
    )
    return out, scales


def swiglu_gradient(
    gradient: Tensor, gate_up: Tensor, dtype: torch.dtype, exact: Tensor | None, stats: Tensor | None
) -> Pair:
    """The gradient of gate and up [rows, 2 x half] in FP8, and the rows' scales, for that of their SwiGLU."""
    rows, half = gradient.shape
    out = gate_up.new_empty((rows, 2 * half), dtype=dtype)
    scales = gate_up.new_empty(rows, dtype=torch.float32)
    block = _sizes(half)[0]
    _swiglu_gradient[(rows,)](
        gradient,
        gate_up,
        out,
        scales,
        scales if stats is None else stats,
        gate_up if exact is None else exact,
        rows,
        half,
        BLOCK=block,
        LOG2_LIMIT=LOG2_LIMIT[dtype],
        HAS_STATS=stats is not None,
        HAS_EXACT=exact is not None,
        num_warps=_sizes(2 * half)[1],
    )
    return out, scales


def transpose(values: Tensor, scales: Tensor, into: Pair | None = None) -> Pair:
    """FP8 values [rows, columns] transposed, with the largest scale for each of them; one scale [1] is kept."""
    rows, columns = values.shape
    has_one = scales.numel() == 1 and rows > 1
    out, out_scales = into or (values.new_empty((columns, rows)), scales if has_one else scales.new_empty(columns))
    block_rows, block_columns, warps = TRANSPOSE_BLOCK
    _transpose[(triton.cdiv(columns, block_columns), triton.cdiv(rows, block_rows))](
        values,
        scales,
        out,
        out_scales,
        rows,
        columns,
        ROWS=block_rows,
        COLUMNS=block_columns,
        ALL_ROWS=triton.next_power_of_2(rows),
        ONE_SCALE=has_one,
        num_warps=warps,
    )
    return out, out_scales
