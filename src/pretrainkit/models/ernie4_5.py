"""ERNIE 4.5 (dense): Llama's computation with heads rotated by neighbouring dimensions, and one switch for biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.weight_rows import dense_weights


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that an ERNIE 4.5 config.json describes: use_bias is that of all projections."""
    bias = bool(config["use_bias"])
    features = {"rotary_interleaved": True, "output_bias": bias, "mlp_bias": bias}
    return read_decoder("ernie4_5", config, features=features, qkv_bias=bias)


FAMILY = Family(
    name="ernie4_5",
    architectures=("Ernie4_5ForCausalLM",),
    fields=ConfigFields(read=names("use_bias")),
    defaults={
        **DECODER_DEFAULTS,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 131072,
        "num_attention_heads": 16,
        "num_hidden_layers": 18,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "vocab_size": 103424,
    },
    shape=read_shape,
    weights=dense_weights,
)
