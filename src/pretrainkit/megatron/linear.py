"""Norms and linear layers of Megatron's transformer layer from torch modules.

Parameter names are those of Transformer Engine's spec: a norm's weight belongs to the linear layer after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrainkit.megatron.tp_overlap import AllGatherMatmul, MatmulReduceScatter, peer_memory_of


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    first = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    weight = torch.nn.Parameter(first(size, dtype=config.params_dtype))
    # Under sequence parallelism each rank has a chunk of the tokens; Megatron sums these gradients over TP ranks.
    weight.sequence_parallel = config.sequence_parallel
    return weight


def rms_norm(hidden: Tensor, weight: Tensor, config: TransformerConfig) -> Tensor:
    """Root-mean-square norm over the last dimension, in fp32 inside (torch's own kernel)."""
    if config.layernorm_zero_centered_gamma:
        scale = 1 + weight.float()  # in bf16 the sum would lose most of the weight
        return F.rms_norm(hidden.float(), hidden.shape[-1:], scale, config.layernorm_epsilon).to(hidden.dtype)
    return F.rms_norm(hidden, hidden.shape[-1:], weight, config.layernorm_epsilon)


class RMSNorm(torch.nn.Module):
    """The norm of Megatron's layers and of its final norm."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = _norm_weight(config, hidden_size)

    def get_extra_state(self) -> None:
        """Nothing: Transformer Engine's norm has this entry and doesn't load a checkpoint without it."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing to restore."""

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.config)


class HeadRMSNorm(RMSNorm):
    """The norm of query or key heads in Triton: torch's kernel is made for long rows."""

    def forward(self, hidden: Tensor) -> Tensor:
        from pretrainkit.megatron.triton.head_norm import head_norm

        return head_norm(hidden, self.weight, self.config.layernorm_epsilon)


class FusedResidualRMSNorm(RMSNorm):
    """The norm before experts, with the gradient of the skip connection; see the class below."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _normalize_with_residual(hidden, self.weight, self.config)


def _normalize_with_residual(hidden: Tensor, weight: Tensor, config: TransformerConfig) -> Tensor:
    from pretrainkit.megatron.triton.rms_norm import rms_norm_with_residual

    normed, residual = rms_norm_with_residual(hidden, weight, config.layernorm_epsilon)
    if torch.is_grad_enabled():  # not in a recomputed block's first forward, which the sum isn't part of
        hidden.residual = residual
    return normed


class RMSNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear layer: Transformer Engine's LayerNormColumnParallelLinear."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        bias: bool,
        overlaps: bool = False,
        has_norm: bool = True,
        has_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        """`has_bias` gives a bias that Megatron, which asks for one by `bias`, doesn't know of."""
        super().__init__(input_size, output_size, config=config, bias=bias or has_bias, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size) if has_norm else None
        self._overlaps = overlaps

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **settings: Any) -> Tensor:
        if self._overlaps and (memory := peer_memory_of(self.tp_group)):
            output = AllGatherMatmul.apply(input, weight, memory, self.gradient_accumulation_fusion)
            return output if bias is None else output + bias
        return super()._forward_impl(input, weight, bias, **settings)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self._normalize(hidden), *args, **kwargs)

    def _normalize(self, hidden: Tensor) -> Tensor:
        return hidden if self.layer_norm_weight is None else rms_norm(hidden, self.layer_norm_weight, self.config)


class FusedResidualRMSNormColumnParallelLinear(RMSNormColumnParallelLinear):
    """The same with a norm whose backward also adds the gradient of the skip connection.

    Megatron's layer passes the residual stream to this module and, by another reference, to the sum after the block.
    So the norm's second output, the skip connection, is attached to the tensor that both get (`add_fused_residual`).
    """

    def _normalize(self, hidden: Tensor) -> Tensor:
        assert self.layer_norm_weight is not None
        return _normalize_with_residual(hidden, self.layer_norm_weight, self.config)


class OverlappedRowParallelLinear(RowParallelLinear):
    """A row-parallel linear layer without bias whose reduce-scatter overlaps with its GEMM."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        if memory := peer_memory_of(self.tp_group):
            return MatmulReduceScatter.apply(input_, self.weight, memory, self.gradient_accumulation_fusion), None
        return super().forward(input_)


def add_fused_residual(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Megatron's bias-dropout-add that takes the skip connection from the block's norm."""
    bias_dropout_add = get_bias_dropout_add(training, fused)

    def add(output_with_bias: tuple[Tensor, Tensor | None], hidden: Tensor, dropout: float) -> Tensor:
        return bias_dropout_add(output_with_bias, hidden.__dict__.pop("residual", hidden), dropout)

    return add
