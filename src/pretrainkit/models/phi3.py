"""Phi-3 and Phi-4: Llama's computation; query, key and value are one tensor, and gate and up another."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder, window_features
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.weight_rows import dense_weights, gated_mlp


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Phi-3 config.json describes."""
    return read_decoder("phi3", config, features=window_features(config))


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    fields=ConfigFields(
        read=names("original_max_position_embeddings partial_rotary_factor sliding_window"),
    ),
    defaults={
        **DECODER_DEFAULTS,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-05,
        "sliding_window": None,
        "vocab_size": 32064,
    },
    rope_types=("default", "longrope"),  # its class takes yarn for longrope
    shape=read_shape,
    weights=partial(dense_weights, fused_qkv="qkv_proj", mlp=partial(gated_mlp, names=("gate_up_proj", "down_proj"))),
)
