"""Mistral: Llama's computation with an independent head dimension, and a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder, window_features
from pretrainkit.models.family import ConfigFields, Family, NemoClasses, names
from pretrainkit.models.weight_rows import dense_weights


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Mistral config.json describes."""
    return read_decoder("mistral", config, features=window_features(config))


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    fields=ConfigFields(read=names("sliding_window")),
    defaults={
        **DECODER_DEFAULTS,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    shape=read_shape,
    weights=dense_weights,
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.mistral:MistralModel",
        config="nemo.collections.llm.gpt.model.mistral:MistralConfig7B",
        fields={"window_size": None, "cp_comm_type": None},  # its default is Mistral 7B v0.1's sliding window
    ),
)
