"""Granite 3 (dense): Llama's computation with factors of embeddings, residuals, attention scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import BIAS_FIELDS, DECODER_DEFAULTS, read_decoder
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.weight_rows import dense_weights


def granite_features(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the layers of all Granite models share."""
    return {
        "attention_scale": float(config["attention_multiplier"]),
        "embedding_multiplier": float(config["embedding_multiplier"]),
        "logits_divisor": float(config["logits_scaling"]),
        "residual_multiplier": float(config["residual_multiplier"]),
    }


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Granite config.json describes."""
    return read_decoder("granite", config, features=granite_features(config))


GRANITE_FIELDS = ConfigFields(
    read=names("attention_bias attention_multiplier embedding_multiplier logits_scaling residual_multiplier")
)
GRANITE_DEFAULTS: Mapping[str, Any] = {
    **DECODER_DEFAULTS,
    "attention_bias": False,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": None,
    "residual_multiplier": 1.0,
    "vocab_size": 32000,
}


FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    fields=BIAS_FIELDS | GRANITE_FIELDS,
    defaults={**GRANITE_DEFAULTS, "mlp_bias": False},
    shape=read_shape,
    weights=dense_weights,
)
