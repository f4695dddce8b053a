"""RMSNorm in Triton that also carries the residual stream past the block it stands before.

Before a block the stream goes two ways, into the norm and past the block. Plain autograd adds the two gradients in a
launch of its own, after two of the norm's. Here the stream that goes past comes out of the norm too, so that one launch
makes its whole gradient, in fp32 until the end, and the weight's parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS_PER_WARP = 512
WARPS_PER_PROCESSOR = 16
"""Of the backward kernel; its programs stay and take row after row, to sum the weight's gradient in registers."""


@triton.jit
def _normalize(  # type: ignore[no-untyped-def]
    hidden, weight, normed, scales, columns, eps, BLOCK: tl.constexpr
):
    """One row: hidden x weight over the root of its mean square, and one over that root."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    exists = column < columns
    values = tl.load(hidden + row * columns + column, mask=exists, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / columns + eps)
    factors = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(normed + row * columns + column, (values * scale * factors).to(normed.dtype.element_ty), mask=exists)
    tl.store(scales + row, scale)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    scales,
    normed_gradient,
    kept_gradient,
    hidden_gradient,
    weight_parts,
    rows,
    columns,
    BLOCK: tl.constexpr,
    HAS_KEPT: tl.constexpr,
):
    """Every so-manieth row's gradient, and this program's part of the weight's."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    exists = column < columns
    factors = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    weight_part = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        place = tl.cast(row, tl.int64) * columns + column
        scale = tl.load(scales + row)
        unit = tl.load(hidden + place, mask=exists, other=0.0).to(tl.float32) * scale
        above = tl.load(normed_gradient + place, mask=exists, other=0.0).to(tl.float32)
        weight_part += above * unit
        above *= factors
        gradient = (above - unit * (tl.sum(above * unit) / columns)) * scale
        if HAS_KEPT:
            gradient += tl.load(kept_gradient + place, mask=exists, other=0.0).to(tl.float32)
        tl.store(hidden_gradient + place, gradient.to(hidden_gradient.dtype.element_ty), mask=exists)
    tl.store(weight_parts + program * columns + column, weight_part, mask=exists)


class KeepingRMSNorm(torch.autograd.Function):
    """See `keeping_rms_norm`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        hidden = hidden.contiguous()
        columns = hidden.size(-1)
        rows = hidden.numel() // columns
        normed = torch.empty_like(hidden)
        scales = hidden.new_empty(rows, dtype=torch.float32)
        block, warps = _sizes(columns)
        _normalize[(rows,)](hidden, weight, normed, scales, columns, eps, BLOCK=block, num_warps=warps)
        ctx.save_for_backward(hidden, weight, scales)
        ctx.set_materialize_grads(False)
        return normed, hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, normed_gradient: Tensor | None, kept_gradient: Tensor | None) -> tuple[Any, ...]:
        if normed_gradient is None:
            return kept_gradient, None, None
        hidden, weight, scales = ctx.saved_tensors
        columns, rows = hidden.size(-1), scales.numel()
        block, warps = _sizes(columns)
        programs = min(rows, _processors(hidden.device) * max(1, WARPS_PER_PROCESSOR // warps))
        hidden_gradient = torch.empty_like(hidden)
        weight_parts = hidden.new_empty((programs, columns), dtype=torch.float32)
        has_kept = kept_gradient is not None
        _gradients[(programs,)](
            hidden,
            weight,
            scales,
            normed_gradient.contiguous(),
            kept_gradient.contiguous() if kept_gradient is not None else hidden,
            hidden_gradient,
            weight_parts,
            rows,
            columns,
            BLOCK=block,
            HAS_KEPT=has_kept,
            num_warps=warps,
        )
        return hidden_gradient, weight_parts.sum(0).to(weight.dtype), None


def _sizes(columns: int) -> tuple[int, int]:
    """Columns that a program holds in registers, and its warps."""
    block: int = triton.next_power_of_2(columns)
    return block, min(16, max(1, block // COLUMNS_PER_WARP))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def keeping_rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `hidden` [..., h] over its last dimension times `weight` [h], and `hidden` itself.

    What goes on with the stream must take it from here, not from the argument.
    """
    return KeepingRMSNorm.apply(hidden, weight, eps)
