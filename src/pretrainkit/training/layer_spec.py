"""Megatron's transformer layer from plain torch parts, for machines without Transformer Engine.

Parameter names are those of Transformer Engine's spec (a norm's weight belongs to the linear layer after
it), so that checkpoints move freely between the two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from pretrainkit.training.attention import ScaledDotProductAttention


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    # Under sequence parallelism each rank sees a part of the tokens; Megatron sums such gradients over TP.
    weight.sequence_parallel = config.sequence_parallel
    return weight


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float, by_liger: bool) -> Tensor:
    if not by_liger:
        return F.rms_norm(hidden, hidden.shape[-1:], weight, eps)
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # As Hugging Face's Llama: the normed values are rounded to the weight's type before the product with it.
    return LigerRMSNormFunction.apply(hidden, weight, eps, 0.0, "llama", False)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension, in fp32 inside; by torch's kernel or liger-kernel's."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, by_liger: bool = False, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.by_liger = by_liger
        self.weight = _norm_weight(config, hidden_size)

    def get_extra_state(self) -> None:
        """Nothing; but Transformer Engine's norm has this entry, and won't load a checkpoint without it."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing to restore."""

    def forward(self, hidden: Tensor) -> Tensor:
        return _rms_norm(hidden, self.weight, self.eps, self.by_liger)


class RMSNormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel linear layer: Transformer Engine's LayerNormColumnParallelLinear."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, by_liger: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.by_liger = by_liger
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = _rms_norm(hidden, self.layer_norm_weight, self.config.layernorm_epsilon, self.by_liger)
        return super().forward(normed, *args, **kwargs)


def torch_layer_spec(
    config: TransformerConfig, vp_stage: int | None = None, *, norm: str = "torch"
) -> TransformerBlockSubmodules:
    """The decoder's layers and final norm for a dense RMSNorm transformer; `norm` is torch or liger."""
    if config.num_moe_experts or config.normalization != "RMSNorm":
        raise NotImplementedError(
            f"without Transformer Engine only dense RMSNorm models train; found {config.normalization}, "
            f"{config.num_moe_experts} experts"
        )
    layer = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    parts = layer.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = ScaledDotProductAttention
    by_liger = {"by_liger": norm == "liger"}
    norm_spec = ModuleSpec(module=RMSNorm, params=by_liger)
    norm_and_linear = ModuleSpec(module=RMSNormColumnParallelLinear, params=by_liger)
    attention.linear_qkv = norm_and_linear
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm_spec
    parts.mlp.submodules.linear_fc1 = norm_and_linear
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    # Megatron's local spec renames separate norms to TE's names when saving; ours have those names already.
    parts.sharded_state_dict_keys_map = {}
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm_spec)
