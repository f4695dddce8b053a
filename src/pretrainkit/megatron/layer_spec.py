"""Megatron's transformer layer from torch modules, without Transformer Engine.

Parameter names are those of Transformer Engine's spec (a norm's weight belongs to the linear layer after it), so that
checkpoints load with either.
"""

from __future__ import annotations

import copy

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from pretrainkit.config.layer_features import LLAMA, LayerFeatures
from pretrainkit.config.schema import Fp8, RopeScaling
from pretrainkit.megatron import patches
from pretrainkit.megatron.attention import ScaledDotProductAttention
from pretrainkit.megatron.delta_net import GatedDeltaNet, GatedQueryLinear
from pretrainkit.megatron.experts import GroupedExperts
from pretrainkit.megatron.features import (
    BlockOutputLinear,
    KeysAsValuesLinear,
    LocalSelfAttention,
    RMSNormOverHeads,
    ScalarTransformerLayer,
    Xielu,
)
from pretrainkit.megatron.fp8.layers import use_fp8
from pretrainkit.megatron.latent_attention import LatentSelfAttention
from pretrainkit.megatron.linear import (
    FusedResidualRMSNorm,
    FusedResidualRMSNormColumnParallelLinear,
    HeadRMSNorm,
    OverlappedRowParallelLinear,
    RMSNorm,
    RMSNormColumnParallelLinear,
    add_fused_residual,
)
from pretrainkit.megatron.token_dispatch import GroupedMoELayer


def torch_layer_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    fused_norm: bool = False,
    overlaps: bool = False,
    fp8: Fp8 | None = None,
    features: LayerFeatures = LLAMA,
    rope_scaling: RopeScaling | None = None,
) -> TransformerBlockSubmodules:
    """The decoder's layers and final norm for an RMSNorm transformer, dense or with experts in some or all layers.

    With `overlaps`, tensor-parallel communication overlaps with GEMMs; this needs sequence parallelism and CUDA. With
    `fp8`, the layers' GEMMs are in FP8, except for those layers at both ends that it names.
    """
    if config.normalization != "RMSNorm":
        raise NotImplementedError(f"layers without Transformer Engine have RMSNorm; found {config.normalization}")
    if config.num_moe_experts:
        patches.apply(patches.EXPERTS)
    first = get_transformer_layer_offset(config, vp_stage)
    numbers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    has_experts = {number: bool(config.num_moe_experts) and number not in features.dense_layers for number in numbers}
    local = range(config.num_layers) if features.global_attention is None else features.local_layers
    kinds = {
        number: (has_experts[number], number in features.delta_net_layers, number not in local) for number in numbers
    }
    factor = rope_scaling.attention_factor if rope_scaling else 1.0
    made = {
        kind: _layer(config, features, factor, *kind, fused_norm=fused_norm, overlaps=overlaps)
        for kind in set(kinds.values())
    }
    layers = {number: made[kind] for number, kind in kinds.items()}
    if fp8:
        in_fp8 = {kind: use_fp8(copy.deepcopy(layer), fp8) for kind, layer in made.items()}
        kept = range(fp8.first_last_bf16, config.num_layers - fp8.first_last_bf16)
        layers |= {number: in_fp8[kind] for number, kind in kinds.items() if number in kept}
    return TransformerBlockSubmodules(layer_specs=list(layers.values()), layer_norm=RMSNorm)


def _layer(
    config: TransformerConfig,
    features: LayerFeatures,
    rotary_factor: float,
    has_experts: bool,
    has_delta_net: bool,
    is_global: bool,
    *,
    fused_norm: bool,
    overlaps: bool,
) -> ModuleSpec:
    """A layer with experts, or a dense one, with attention, `GlobalAttention` or a gated delta net."""
    layer: ModuleSpec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
    )
    parts = layer.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = ModuleSpec(
        module=ScaledDotProductAttention, params={"features": features, "rotary_factor": rotary_factor}
    )
    fused_norm = fused_norm and features.norm_before
    linear = FusedResidualRMSNormColumnParallelLinear if fused_norm else RMSNormColumnParallelLinear
    attention.linear_qkv = ModuleSpec(module=linear, params={"overlaps": overlaps, "has_norm": features.norm_before})
    if has_experts:
        parts.pre_mlp_layernorm = FusedResidualRMSNorm if fused_norm else RMSNorm
        parts.mlp.module, parts.mlp.params = GroupedMoELayer, {"multiplier": features.residual_multiplier}
        parts.mlp.submodules.experts = ModuleSpec(module=GroupedExperts, params={"features": features})
    else:
        parts.mlp.submodules.linear_fc1, parts.pre_mlp_layernorm = attention.linear_qkv, IdentityOp
    if overlaps:
        attention.linear_proj = parts.mlp.submodules.linear_fc2 = OverlappedRowParallelLinear
    if fused_norm:
        parts.self_attn_bda = parts.mlp_bda = add_fused_residual
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = HeadRMSNorm if fused_norm else RMSNorm
    if features != LLAMA:
        _use_features(layer, config, features)
        if is_global and features.global_attention and features.global_attention.keys_are_values:
            attention.linear_qkv = ModuleSpec(module=KeysAsValuesLinear, params=attention.linear_qkv.params)
    parts.input_layernorm = IdentityOp
    if features.latent_attention:
        params = {**parts.self_attention.params, "features": features, "rotary_factor": rotary_factor}
        parts.self_attention = ModuleSpec(module=LatentSelfAttention, params=params)
        parts.input_layernorm = RMSNorm
    if has_delta_net:
        parts.self_attention = ModuleSpec(module=GatedDeltaNet, params={"features": features})
        parts.input_layernorm = RMSNorm
    # Megatron's local spec renames separate norms to Transformer Engine's names when saving; ours have those names.
    parts.sharded_state_dict_keys_map = {}
    return layer


def _use_features(layer: ModuleSpec, config: TransformerConfig, features: LayerFeatures) -> None:
    """Put the modules of features into the spec of a layer."""
    attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
    if features.layer_scalar:
        layer.module = ScalarTransformerLayer
    if features.local_rope_theta:
        attention.module = LocalSelfAttention
        attention.params = {**attention.params, "features": features}
    parts = attention.submodules
    if features.output_gate:
        parts.linear_qkv = ModuleSpec(module=GatedQueryLinear, params=parts.linear_qkv.params)
    if features.qk_norm_over_heads:
        heads = {"q_layernorm": config.num_attention_heads, "k_layernorm": config.num_query_groups}
        for name, num_heads in heads.items():
            setattr(parts, name, ModuleSpec(module=RMSNormOverHeads, params={"num_heads": num_heads}))
    if features.norm_after or features.output_bias or features.mlp_bias or features.residual_multiplier != 1:

        def output(has_bias: bool) -> ModuleSpec:
            return ModuleSpec(module=BlockOutputLinear, params={"features": features, "has_bias": has_bias})

        parts.linear_proj = output(features.output_bias)
        if mlp.module is MLP:
            mlp.submodules.linear_fc2 = output(features.mlp_bias)
    if mlp.module is MLP:
        if features.activation == "xielu":
            mlp.submodules.activation_func = Xielu
        first = mlp.submodules.linear_fc1
        mlp.submodules.linear_fc1 = ModuleSpec(
            module=first.module, params={**first.params, "has_bias": features.mlp_bias}
        )
