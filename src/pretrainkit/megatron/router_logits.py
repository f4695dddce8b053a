"""The router's product in fp32, of bf16 tensors, on tensor cores.

Products of bf16 numbers are exact in fp32, in which tensor cores add them up: so the logits are those of Megatron's
product of fp32 copies, which has no tensor cores. A gradient in fp32 is the sum of three numbers in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PARTS = 3
"""bf16 numbers of 8 bits each, for the 24 of fp32."""


def bf16_parts(values: Tensor) -> Tensor:
    """values [...] in fp32 to [PARTS, ...] in bf16 whose sum they are, but for the last bit."""
    parts = values.new_empty((PARTS, *values.shape), dtype=torch.bfloat16)
    for part in parts:
        part.copy_(values)
        values = values - part
    return parts


class _Logits(torch.autograd.Function):
    """inputs [t, h] and weight [e, h] in bf16 to logits [t, e] in fp32."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return torch.mm(inputs, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        parts = bf16_parts(gradient).transpose(0, 1).flatten(1)  # [t, PARTS x e]
        of_inputs = torch.mm(parts, weight.repeat(PARTS, 1))
        of_weight = torch.mm(parts.t(), inputs, out_dtype=torch.float32)
        return of_inputs, of_weight.view(PARTS, *weight.shape).sum(0).to(weight.dtype)


def on_tensor_cores(present: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's function for a router's logits; what isn't bf16 on a GPU is left to `present`."""

    def logits(inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
        if not inp.is_cuda or inp.dtype != torch.bfloat16 or router_dtype != torch.float32:
            return present(inp, weight, bias, router_dtype)
        found = _Logits.apply(inp.flatten(0, -2), weight).view(*inp.shape[:-1], -1)
        return found if bias is None else found + bias.float()

    return logits
