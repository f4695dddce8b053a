"""Llama 2, 3, 3.1, 3.2 and what shares their architecture (SmolLM2, Swallow, Yi)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import dense_weights, read_decoder
from pretrainkit.models.family import ConfigFields, Family, NemoClasses


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Llama config.json describes."""
    return read_decoder("llama", config)


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    fields=ConfigFields(fixed={"attention_bias": (False,), "mlp_bias": (False,)}),
    shape=read_shape,
    weights=dense_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.llama:LlamaModel",
        config="nemo.collections.llm.gpt.model.llama:LlamaConfig",
        scaled_rope_config="nemo.collections.llm.gpt.model.llama:Llama31Config",
    ),
)
