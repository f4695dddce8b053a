"""Qwen2 and Qwen2.5: Llama's computation with biases on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.config_fields import QWEN_FIELDS
from pretrainkit.models.decoder import dense_weights, read_decoder
from pretrainkit.models.family import Family, NemoClasses


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Qwen2 config.json describes."""
    return read_decoder("qwen2", config, qkv_bias=True)


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    fields=QWEN_FIELDS,
    shape=read_shape,
    weights=dense_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.qwen2:Qwen2Model",
        config="nemo.collections.llm.gpt.model.qwen2:Qwen2Config",
    ),
)
