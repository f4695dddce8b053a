"""Weight gradients accumulated into the fp32 gradient buffer by the wgrad GEMM itself.

Megatron calls apex's extension for this. torch's own GEMM with an fp32 output does the same: no bf16 gradient is
written, read and added per microbatch. An embedding's gradient is added to the rows that were looked up, without a
bf16 gradient of the full vocabulary.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class WgradGemm:
    """The two functions of apex's `fused_weight_gradient_mlp_cuda` that Megatron calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, output_gradient: Tensor, main_grad: Tensor) -> None:
        """main_grad [out, in] fp32 += output_gradient [tokens, out]^T inputs [tokens, in], both bf16."""
        torch.addmm(main_grad, output_gradient.t(), inputs, out_dtype=torch.float32, out=main_grad)

    @staticmethod
    def wgrad_gemm_accum_fp16(inputs: Tensor, output_gradient: Tensor, main_grad: Tensor) -> None:
        """The same for a buffer of the inputs' dtype."""
        main_grad.addmm_(output_gradient.t(), inputs)


class FusedWgradEmbedding(torch.autograd.Function):
    """Autograd function of `embedding`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        weight.main_grad.index_add_(0, ids.flatten(), gradient.flatten(0, -2).to(weight.main_grad.dtype))
        weight.grad_added_to_main_grad = True
        # Megatron's hooks require a gradient but don't read it; for tied weights the output layer provides it.
        return None, None if hasattr(weight, "zero_out_wgrad") else torch.empty_like(weight)


def embedding(ids: Tensor, weight: Any) -> Tensor:
    """Rows [..., h] of `weight` [v, h] for ids [...]; backward accumulates into `weight.main_grad` if it exists."""
    if not torch.is_grad_enabled() or not hasattr(weight, "main_grad"):
        return F.embedding(ids, weight)
    if hasattr(weight, "zero_out_wgrad"):
        weight.zero_out_wgrad = False  # so that the output layer's gradient is added to ours
    return FusedWgradEmbedding.apply(ids, weight)


functional = types.SimpleNamespace(embedding=embedding)
"""Replaces torch.nn.functional in Megatron's `tensor_parallel.layers`, which calls nothing else of it."""
