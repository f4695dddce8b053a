"""Weight gradients added to the fp32 gradient buffer by the matrix product itself.

Megatron calls apex's extension for this; torch's own product with an fp32 result serves, so that no bf16
gradient is written, read and added per microbatch.
"""

from __future__ import annotations

import torch
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


def use_in_megatron() -> None:
    """Let Megatron's linear layers take `gradient_accumulation_fusion`; needs CUDA tensors in bf16."""
    import megatron.core.tensor_parallel.layers as layers

    layers.fused_weight_gradient_mlp_cuda = WeightGradientProduct
    layers._grad_accum_fusion_available = True
