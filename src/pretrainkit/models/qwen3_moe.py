"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import QWEN_MOE_DEFAULTS, QWEN_MOE_FIELDS, read_decoder, read_qwen_moe
from pretrainkit.models.family import ConfigFields, Family, NemoClasses
from pretrainkit.models.weight_rows import moe_weights


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Qwen3-MoE config.json describes."""
    return read_decoder("qwen3_moe", config, qk_norm=True, **read_qwen_moe(config))


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    fields=QWEN_MOE_FIELDS | ConfigFields(fixed={"attention_bias": (False,)}),
    defaults={
        **QWEN_MOE_DEFAULTS,
        "attention_bias": False,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
    },
    aliases={"num_local_experts": "num_experts"},
    shape=read_shape,
    weights=moe_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.qwen3:Qwen3Model",
        config="nemo.collections.llm.gpt.model.qwen3:Qwen3MoEConfig",
        context_length_field="max_position_embeddings",
    ),
)
