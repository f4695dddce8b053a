"""Seed-OSS: Llama's computation with biases on query, key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import BIAS_FIELDS, DECODER_DEFAULTS, read_decoder
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.weight_rows import dense_weights


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Seed-OSS config.json describes: the output projection's bias has its own switch."""
    return read_decoder("seed_oss", config, features={"output_bias": config["attention_out_bias"]})


FAMILY = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    fields=BIAS_FIELDS | ConfigFields(read=names("attention_out_bias"), ignored=names("residual_dropout")),
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": True,
        "attention_out_bias": False,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 27648,
        "max_position_embeddings": 524288,
        "mlp_bias": False,
        "num_attention_heads": 80,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "vocab_size": 155136,
    },
    shape=read_shape,
    weights=dense_weights,
)
