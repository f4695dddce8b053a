"""Megatron's transformer layer from plain torch parts, for machines without Transformer Engine.

Parameter names are those of Transformer Engine's spec (a norm's weight belongs to the linear layer after
it), so that checkpoints move freely between the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrainkit.megatron.attention import ScaledDotProductAttention
from pretrainkit.megatron.tp_overlap import GatheredProduct, ScatteredProduct, exchange_of


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    # Under sequence parallelism each rank sees a part of the tokens; Megatron sums such gradients over TP.
    weight.sequence_parallel = config.sequence_parallel
    return weight


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, in fp32 inside (torch's own kernel)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def get_extra_state(self) -> None:
        """Nothing; but Transformer Engine's norm has this entry, and won't load a checkpoint without it."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing to restore."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)


class RMSNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear layer: Transformer Engine's LayerNormColumnParallelLinear."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, overlaps: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)
        self._overlaps = overlaps

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None, **settings: Any) -> Tensor:
        if self._overlaps and (exchange := exchange_of(self.tp_group)):
            output = GatheredProduct.apply(input, weight, exchange, self.gradient_accumulation_fusion)
            return output if bias is None else output + bias
        return super()._forward_impl(input, weight, bias, **settings)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self._normalize(hidden), *args, **kwargs)

    def _normalize(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon)


class KeepingRMSNormColumnParallelLinear(RMSNormColumnParallelLinear):
    """The same with the norm that carries the residual stream; `add_kept_residual` takes it from there.

    Megatron's layer hands the stream to this module and, as another reference, to the sum after the block. So the
    way past the block is hung on the tensor that both see.
    """

    def _normalize(self, hidden: Tensor) -> Tensor:
        from pretrainkit.megatron.triton.rms_norm import keeping_rms_norm

        normed, kept = keeping_rms_norm(hidden, self.layer_norm_weight, self.config.layernorm_epsilon)
        if torch.is_grad_enabled():  # not where a recomputed block runs for the first time: the sum has no part in it
            hidden.kept = kept
        return normed


class OverlappedRowParallelLinear(RowParallelLinear):
    """A row-parallel linear layer without a bias, whose sum over ranks goes on while it multiplies."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        if exchange := exchange_of(self.tp_group):
            return ScatteredProduct.apply(input_, self.weight, exchange, self.gradient_accumulation_fusion), None
        return super().forward(input_)


def add_kept_residual(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Megatron's sum of a block's output and the residual stream, the stream taken from the block's norm."""
    add = get_bias_dropout_add(training, fused)

    def add_kept(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return add(output_with_bias, residual.__dict__.pop("kept", residual), dropout)

    return add_kept


def torch_layer_spec(
    config: TransformerConfig, vp_stage: int | None = None, *, fused_norm: bool = False, overlaps: bool = False
) -> TransformerBlockSubmodules:
    """The decoder's layers and final norm for a dense RMSNorm transformer.

    With `overlaps` tensor-parallel products go on while their exchange does; needs sequence parallelism and CUDA.
    """
    if config.num_moe_experts or config.normalization != "RMSNorm":
        raise NotImplementedError(
            f"without Transformer Engine only dense RMSNorm models train; found {config.normalization}, "
            f"{config.num_moe_experts} experts"
        )
    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    parts = layer.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = ScaledDotProductAttention
    linear = KeepingRMSNormColumnParallelLinear if fused_norm else RMSNormColumnParallelLinear
    attention.linear_qkv = parts.mlp.submodules.linear_fc1 = ModuleSpec(module=linear, params={"overlaps": overlaps})
    if overlaps:
        attention.linear_proj = parts.mlp.submodules.linear_fc2 = OverlappedRowParallelLinear
    if fused_norm:
        parts.self_attn_bda = parts.mlp_bda = add_kept_residual
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    # Megatron's local spec renames separate norms to TE's names when saving; ours have those names already.
    parts.sharded_state_dict_keys_map = {}
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
