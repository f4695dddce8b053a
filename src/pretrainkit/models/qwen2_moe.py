"""Qwen2-MoE (Qwen1.5-MoE): Qwen2 with experts and a gated shared expert in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import QWEN_MOE_DEFAULTS, QWEN_MOE_FIELDS, read_decoder, read_qwen_moe
from pretrainkit.models.family import ConfigFields, Family, Layout, Weight, names
from pretrainkit.models.weight_rows import Rows, delta_net, gated_mlp, moe_weights


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Qwen2-MoE config.json describes."""
    return read_decoder(
        "qwen2_moe",
        config,
        qkv_bias=config["qkv_bias"],
        shared_expert_ffn_hidden_size=config["shared_expert_intermediate_size"],
        **read_qwen_moe(config),
    )


def weights(shape: ModelShape, net: Rows = delta_net) -> tuple[Weight, ...]:
    """Qwen2-MoE's table: the experts', and the shared expert's with its gate; with the rows `net` of delta nets."""
    ours, theirs = "decoder.layers.{layer}.mlp.shared_experts.", "model.layers.{layer}.mlp.shared_expert"
    shared = (
        *gated_mlp(shape, ours, theirs + ".", ffn_hidden_size=shape.shared_expert_ffn_hidden_size),
        Weight(ours + "gate_weight", (theirs + "_gate.weight",), Layout.REPLICATED, ((1, shape.hidden_size),)),
    )
    return moe_weights(shape, more=shared, net=net)


FAMILY = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    fields=QWEN_MOE_FIELDS | ConfigFields(read=names("shared_expert_intermediate_size qkv_bias")),
    defaults={
        **QWEN_MOE_DEFAULTS,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "shared_expert_intermediate_size": 5632,
    },
    shape=read_shape,
    weights=weights,
)
