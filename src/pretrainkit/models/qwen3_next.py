"""Qwen3-Next: Qwen3-MoE with gated delta nets in three of four layers, and a gate of attention's output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.layer_features import DeltaNet
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models import qwen2_moe
from pretrainkit.models.decoder import QWEN_MOE_DEFAULTS, QWEN_MOE_FIELDS, read_decoder, read_qwen_moe
from pretrainkit.models.family import FULL, LINEAR, ConfigFields, Family, names


def delta_net_features(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the layers of Qwen3-Next and Qwen3.5 share."""
    interval, layers = config["full_attention_interval"], range(config["num_hidden_layers"])
    types = config.get("layer_types") or [FULL if (layer + 1) % interval == 0 else LINEAR for layer in layers]
    net = DeltaNet(
        config["linear_num_key_heads"],
        config["linear_num_value_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        config["linear_conv_kernel_dim"],
    )
    if net.num_value_heads % net.num_key_heads:
        raise RequestError(
            f"linear_num_value_heads {net.num_value_heads} and linear_num_key_heads {net.num_key_heads}",
            where="config.json",
            needed="value heads a multiple of key heads",
        )
    others = tuple(layer for layer in layers if types[layer] == LINEAR)
    return {
        "zero_centered_norm": True,
        "output_gate": True,
        "delta_net": net if others else None,
        "delta_net_layers": others,
    }


def read_shape(config: Mapping[str, Any], family: str = "qwen3_next") -> ModelShape:
    """The shape that a Qwen3-Next config.json describes, or another's with the same fields."""
    return read_decoder(
        family,
        config,
        features=delta_net_features(config),
        qk_norm=True,
        shared_expert_ffn_hidden_size=config["shared_expert_intermediate_size"],
        **read_qwen_moe(config),
    )


DELTA_NET_FIELDS = ConfigFields(
    read=names("""
        full_attention_interval linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
        linear_value_head_dim partial_rotary_factor
    """),
    fixed={"attention_bias": (False,)},
)
DELTA_NET_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "partial_rotary_factor": 0.25,
}
FAMILY = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    fields=QWEN_MOE_FIELDS | DELTA_NET_FIELDS | ConfigFields(read=names("shared_expert_intermediate_size")),
    defaults={
        **QWEN_MOE_DEFAULTS,
        **DELTA_NET_DEFAULTS,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
    layer_types=(FULL, LINEAR),
    rope_types=("default",),
    shape=read_shape,
    weights=qwen2_moe.weights,
)
