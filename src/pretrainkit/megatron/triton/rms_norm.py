"""RMSNorm in Triton with a fused residual gradient.

The residual stream goes into a block's norm and, as the skip connection, past the block. Autograd adds the two
gradients in a separate kernel, after the norm's two. Here the skip connection is a second output of the norm, so that
one kernel computes the sum of both gradients, in fp32 until the end, and partial sums of the weight's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS_PER_WARP = 512
WARPS_PER_MULTIPROCESSOR = 16
"""For the backward kernel, whose programs are persistent and sum the weight's gradient over their rows in registers."""


@triton.jit
def _normalize(  # type: ignore[no-untyped-def]
    hidden, weight, normed, scales, columns, eps, BLOCK: tl.constexpr
):
    """One row: hidden x weight / root mean square, and the reciprocal of the root mean square."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_valid = column < columns
    values = tl.load(hidden + row * columns + column, mask=is_valid, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / columns + eps)
    factors = tl.load(weight + column, mask=is_valid, other=0.0).to(tl.float32)
    tl.store(normed + row * columns + column, (values * scale * factors).to(normed.dtype.element_ty), mask=is_valid)
    tl.store(scales + row, scale)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    hidden,
    weight,
    scales,
    normed_gradient,
    residual_gradient,
    hidden_gradient,
    weight_gradients,
    rows,
    columns,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """The gradients of this program's rows, and their share of the weight's gradient."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    is_valid = column < columns
    factors = tl.load(weight + column, mask=is_valid, other=0.0).to(tl.float32)
    weight_gradient = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * columns + column
        scale = tl.load(scales + row)
        unit = tl.load(hidden + offset, mask=is_valid, other=0.0).to(tl.float32) * scale
        above = tl.load(normed_gradient + offset, mask=is_valid, other=0.0).to(tl.float32)
        weight_gradient += above * unit
        above *= factors
        gradient = (above - unit * (tl.sum(above * unit) / columns)) * scale
        if HAS_RESIDUAL:
            gradient += tl.load(residual_gradient + offset, mask=is_valid, other=0.0).to(tl.float32)
        tl.store(hidden_gradient + offset, gradient.to(hidden_gradient.dtype.element_ty), mask=is_valid)
    tl.store(weight_gradients + program * columns + column, weight_gradient, mask=is_valid)


class RMSNormWithResidual(torch.autograd.Function):
    """Autograd function of `rms_norm_with_residual`."""

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
    def backward(ctx: Any, normed_gradient: Tensor | None, residual_gradient: Tensor | None) -> tuple[Any, ...]:
        if normed_gradient is None:
            return residual_gradient, None, None
        hidden, weight, scales = ctx.saved_tensors
        hidden_gradient, weight_gradient = gradients(hidden, weight, scales, normed_gradient, residual_gradient)
        return hidden_gradient, weight_gradient, None


def gradients(
    hidden: Tensor, weight: Tensor, scales: Tensor, normed_gradient: Tensor, residual_gradient: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of `hidden` [..., h] and `weight` [h], from those of the norm and of the skip connection.

    `scales` are the reciprocals of the rows' root mean squares.
    """
    columns, rows = hidden.size(-1), scales.numel()
    block, warps = _sizes(columns)
    multiprocessors = torch.cuda.get_device_properties(hidden.device).multi_processor_count if hidden.is_cuda else 2
    programs = min(rows, multiprocessors * max(1, WARPS_PER_MULTIPROCESSOR // warps))
    hidden_gradient = torch.empty_like(hidden)
    weight_gradients = hidden.new_empty((programs, columns), dtype=torch.float32)
    has_residual = residual_gradient is not None
    residual_gradient = hidden if residual_gradient is None else residual_gradient.contiguous()
    above = normed_gradient.contiguous(), residual_gradient
    tensors = hidden, weight, scales, *above, hidden_gradient, weight_gradients
    _gradients[(programs,)](*tensors, rows, columns, BLOCK=block, HAS_RESIDUAL=has_residual, num_warps=warps)
    return hidden_gradient, weight_gradients.sum(0).to(weight.dtype)


def _sizes(columns: int) -> tuple[int, int]:
    """Columns that a program keeps in registers, and its number of warps."""
    block: int = triton.next_power_of_2(columns)
    return block, min(16, max(1, block // COLUMNS_PER_WARP))


def rms_norm_with_residual(hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `hidden` [..., h] over its last dimension times `weight` [h], and `hidden` as the skip connection.

    The residual stream must continue from the second output, not from the argument.
    """
    return RMSNormWithResidual.apply(hidden, weight, eps)
