"""SwiGLU of experts times the router's probability of a row, in Triton; also gpt-oss's clamped form.

Only the input is saved. All is computed in fp32, as Megatron's fused function for experts has it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 1024
"""Columns that a program has at a time."""


@triton.jit
def _gated(gate, up, limit, alpha, CLAMPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The activated gate, its derivative, and the factor that it is multiplied by."""
    if CLAMPED:
        inside = gate <= limit
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        sigmoid = tl.sigmoid(alpha * gate)
        derivative = tl.where(inside, sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid)), 0.0)
    else:
        sigmoid = tl.sigmoid(gate)
        derivative = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return gate * sigmoid, derivative, up


@triton.jit
def _activate(  # type: ignore[no-untyped-def]
    gate_up, shares, inner, ffn, limit, alpha, CLAMPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_valid = column < ffn
    place = row * 2 * ffn + column
    gate = tl.load(gate_up + place, mask=is_valid, other=0.0).to(tl.float32)
    up = tl.load(gate_up + place + ffn, mask=is_valid, other=0.0).to(tl.float32)
    activated, _, factor = _gated(gate, up, limit, alpha, CLAMPED)
    value = activated * factor * tl.load(shares + row)
    tl.store(inner + row * ffn + column, value.to(inner.dtype.element_ty), mask=is_valid)


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    gradient, gate_up, shares, of_gate_up, of_shares, ffn, limit, alpha, CLAMPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(shares + row)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, ffn, BLOCK):
        column = first + tl.arange(0, BLOCK)
        is_valid = column < ffn
        place = row * 2 * ffn + column
        gate = tl.load(gate_up + place, mask=is_valid, other=0.0).to(tl.float32)
        up = tl.load(gate_up + place + ffn, mask=is_valid, other=0.0).to(tl.float32)
        above = tl.load(gradient + row * ffn + column, mask=is_valid, other=0.0).to(tl.float32)
        activated, derivative, factor = _gated(gate, up, limit, alpha, CLAMPED)
        total += above * activated * factor
        above *= share
        of_up = above * activated
        if CLAMPED:
            of_up = tl.where((up >= -limit) & (up <= limit), of_up, 0.0)
        of_gate = above * factor * derivative
        tl.store(of_gate_up + place, of_gate.to(of_gate_up.dtype.element_ty), mask=is_valid)
        tl.store(of_gate_up + place + ffn, of_up.to(of_gate_up.dtype.element_ty), mask=is_valid)
    tl.store(of_shares + row, tl.sum(total))


class ExpertSwiGLU(torch.autograd.Function):
    """Autograd function of `expert_swiglu`."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, shares: Tensor, limit: float, alpha: float) -> Tensor:
        gate_up, shares = gate_up.contiguous(), shares.contiguous()
        rows, ffn = len(gate_up), gate_up.size(1) // 2
        inner = gate_up.new_empty(rows, ffn)
        block, warps = _sizes(ffn)
        ctx.settings = {"limit": limit, "alpha": alpha, "CLAMPED": limit > 0, "BLOCK": block, "num_warps": warps}
        if rows:
            _activate[(rows, triton.cdiv(ffn, block))](gate_up, shares, inner, ffn, **ctx.settings)
        ctx.save_for_backward(gate_up, shares)
        return inner

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate_up, shares = ctx.saved_tensors
        of_gate_up, of_shares = torch.empty_like(gate_up), torch.empty_like(shares)
        if rows := len(gate_up):
            tensors = gradient.contiguous(), gate_up, shares, of_gate_up, of_shares
            _gradients[(rows,)](*tensors, gate_up.size(1) // 2, **ctx.settings)
        return of_gate_up, of_shares, None, None


def _sizes(ffn: int) -> tuple[int, int]:
    block: int = min(MAX_BLOCK, triton.next_power_of_2(ffn))
    return block, max(1, min(4, block // 256))


def expert_swiglu(gate_up: Tensor, shares: Tensor, limit: float = 0.0, alpha: float = 1.0) -> Tensor:
    """gate_up [t, 2 f] and shares [t] fp32 to [t, f]: silu(gate) x up x share.

    With a `limit`, as gpt-oss has it: gate and up are clamped, the sigmoid has the slope `alpha`, up is one more.
    """
    return ExpertSwiGLU.apply(gate_up, shares, limit, alpha)
