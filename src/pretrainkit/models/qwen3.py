"""Qwen3: Llama's computation with an RMSNorm on each query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.config_fields import QWEN_FIELDS
from pretrainkit.models.decoder import dense_weights, read_decoder
from pretrainkit.models.family import Family, NemoClasses


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Qwen3 config.json describes; the default head dimension is 128."""
    return read_decoder("qwen3", {"head_dim": 128, **config}, qk_norm=True)


FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    fields=replace(QWEN_FIELDS, fixed={**QWEN_FIELDS.fixed, "attention_bias": (False,)}),
    shape=read_shape,
    weights=dense_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.qwen3:Qwen3Model",
        config="nemo.collections.llm.gpt.model.qwen3:Qwen3Config",
        context_length_field="max_position_embeddings",
    ),
)
