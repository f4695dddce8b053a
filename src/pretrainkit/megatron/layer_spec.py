"""Megatron's transformer layer from torch modules, without Transformer Engine.

Parameter names are those of Transformer Engine's spec (a norm's weight belongs to the linear layer after it), so that
checkpoints load with either.
"""

from __future__ import annotations

import copy

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from pretrainkit.config.schema import Fp8
from pretrainkit.megatron import patches
from pretrainkit.megatron.attention import ScaledDotProductAttention
from pretrainkit.megatron.experts import GroupedExperts
from pretrainkit.megatron.fp8.layers import use_fp8
from pretrainkit.megatron.linear import (
    FusedResidualRMSNormColumnParallelLinear,
    OverlappedRowParallelLinear,
    RMSNorm,
    RMSNormColumnParallelLinear,
    add_fused_residual,
)


def torch_layer_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    fused_norm: bool = False,
    overlaps: bool = False,
    fp8: Fp8 | None = None,
) -> TransformerBlockSubmodules:
    """The decoder's layers and final norm for an RMSNorm transformer that is dense or has experts in every layer.

    With `overlaps`, tensor-parallel communication overlaps with GEMMs; this needs sequence parallelism and CUDA. With
    `fp8`, the layers' GEMMs are in FP8, except for those layers at both ends that it names.
    """
    if config.normalization != "RMSNorm":
        raise NotImplementedError(f"layers without Transformer Engine have RMSNorm; found {config.normalization}")
    if config.num_moe_experts:
        patches.apply(patches.EXPERTS)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    parts = layer.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = ScaledDotProductAttention
    linear = FusedResidualRMSNormColumnParallelLinear if fused_norm else RMSNormColumnParallelLinear
    attention.linear_qkv = ModuleSpec(module=linear, params={"overlaps": overlaps})
    if config.num_moe_experts:
        parts.pre_mlp_layernorm = RMSNorm
        parts.mlp.submodules.experts = GroupedExperts
    else:
        parts.mlp.submodules.linear_fc1, parts.pre_mlp_layernorm = attention.linear_qkv, IdentityOp
    if overlaps:
        attention.linear_proj = parts.mlp.submodules.linear_fc2 = OverlappedRowParallelLinear
    if fused_norm:
        parts.self_attn_bda = parts.mlp_bda = add_fused_residual
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    parts.input_layernorm = IdentityOp
    # Megatron's local spec renames separate norms to Transformer Engine's names when saving; ours have those names.
    parts.sharded_state_dict_keys_map = {}
    layers = [layer] * get_num_layers_to_build(config, vp_stage=vp_stage)
    if fp8:
        in_fp8, first = use_fp8(copy.deepcopy(layer), fp8), get_transformer_layer_offset(config, vp_stage)
        kept = range(fp8.first_last_bf16, config.num_layers - fp8.first_last_bf16)
        layers = [in_fp8 if first + number in kept else layer for number in range(len(layers))]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)
