"""Megatron's mixture-of-experts layer from torch modules, to evaluate models without Transformer Engine.

Experts run one after another (SequentialMLP). Names of parameters and entries of checkpoints are those of the
Transformer Engine layers.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from pretrainkit.config.schema import ModelShape
from pretrainkit.megatron import patches
from pretrainkit.megatron.attention import ScaledDotProductAttention
from pretrainkit.megatron.layer_spec import RMSNorm, RMSNormColumnParallelLinear


def expert_config_fields(*, tensor_parallel_size: int) -> dict[str, Any]:
    """Keyword arguments for TransformerConfig with which expert layers run on a CPU."""
    return {
        # The dispatcher that needs no CUDA; Megatron requires sequence parallelism with experts under TP.
        "moe_token_dispatcher_type": "allgather",
        "moe_grouped_gemm": False,
        "sequence_parallel": tensor_parallel_size > 1,
    }


def torch_expert_layer_spec(config: TransformerConfig, shape: ModelShape) -> TransformerBlockSubmodules:
    """The decoder's layers and final norm for a model with experts in every layer."""
    patches.apply(patches.EXPERTS)
    layer = get_gpt_layer_local_spec(
        num_experts=shape.num_experts, normalization="RMSNorm", qk_layernorm=shape.qk_norm, moe_grouped_gemm=False
    )
    parts = layer.submodules
    attention = parts.self_attention.submodules
    attention.core_attention = ScaledDotProductAttention
    attention.linear_qkv = RMSNormColumnParallelLinear
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    parts.input_layernorm, parts.pre_mlp_layernorm = IdentityOp, RMSNorm
    parts.sharded_state_dict_keys_map = {}
    if shape.shared_expert_ffn_hidden_size:
        parts.mlp.submodules.shared_experts.params["gate"] = True
    num_layers = get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
