"""Weight gradients added to the fp32 gradient buffer by the matrix product itself.

Megatron calls apex's extension for this; torch's own product with an fp32 result serves, so that no bf16
gradient is written, read and added per microbatch. An embedding's gradient goes to the rows that were looked up, in
place of a bf16 gradient of the whole vocabulary.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class WeightGradientProduct:
    """The two functions of apex's `fused_weight_gradient_mlp_cuda` that Megatron calls."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, output_gradient: Tensor, main_grad: Tensor) -> None:
        """main_grad [out, in] fp32 += output_gradient [tokens, out]^T inputs [tokens, in], both bf16."""
        torch.addmm(main_grad, output_gradient.t(), inputs, out_dtype=torch.float32, out=main_grad)

    @staticmethod
    def wgrad_gemm_accum_fp16(inputs: Tensor, output_gradient: Tensor, main_grad: Tensor) -> None:
        """The same where the buffer has the inputs' type."""
        main_grad.addmm_(output_gradient.t(), inputs)


class EmbeddingIntoBuffer(torch.autograd.Function):
    """See `embedding`."""

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
        # Megatron's hooks want a gradient that they don't read; of tied weights the output layer gives it.
        return None, None if hasattr(weight, "zero_out_wgrad") else torch.empty_like(weight)


def embedding(ids: Tensor, weight: Any) -> Tensor:
    """The rows [..., h] of `weight` [v, h] for ids [...]; backward adds to `weight.main_grad`, if Megatron made one."""
    if not torch.is_grad_enabled() or not hasattr(weight, "main_grad"):
        return F.embedding(ids, weight)
    if hasattr(weight, "zero_out_wgrad"):
        weight.zero_out_wgrad = False  # the output layer's gradient need not be zeros to be added to ours
    return EmbeddingIntoBuffer.apply(ids, weight)


functional = types.SimpleNamespace(embedding=embedding)
"""Takes the place of torch.nn.functional in Megatron's `tensor_parallel.layers`, which calls nothing else of it."""
