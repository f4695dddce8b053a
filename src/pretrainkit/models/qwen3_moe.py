"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import QWEN_MOE_FIELDS, moe_weights, read_decoder, read_qwen_moe
from pretrainkit.models.family import ConfigFields, Family, NemoClasses


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Qwen3-MoE config.json describes."""
    return read_decoder("qwen3_moe", config, default_head_dim=128, qk_norm=True, **read_qwen_moe(config))


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    fields=QWEN_MOE_FIELDS | ConfigFields(fixed={"attention_bias": (False,)}),
    shape=read_shape,
    weights=moe_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.qwen3:Qwen3Model",
        config="nemo.collections.llm.gpt.model.qwen3:Qwen3MoEConfig",
        context_length_field="max_position_embeddings",
    ),
)
