"""Ministral 3 (text): Mistral's computation with YaRN, and queries that grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder, window_features
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.weight_rows import dense_weights

_GROWTH = "llama_4_scaling_beta"


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Ministral 3 config.json describes."""
    scaling = config["rope_scaling"]
    if scaling is None or scaling.get(_GROWTH) is None:
        raise RequestError(f"rope settings {scaling}", where="config.json", needed=f"rope_type 'yarn' with {_GROWTH}")
    features = {
        "query_growth": float(scaling[_GROWTH]),
        "query_span": scaling["original_max_position_embeddings"],
        **window_features(config),
    }
    return read_decoder("ministral3", config, features=features)


FAMILY = Family(
    name="ministral3",
    architectures=("Ministral3ForCausalLM",),
    fields=ConfigFields(read=names("sliding_window")),
    defaults={
        **DECODER_DEFAULTS,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 34,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "max_position_embeddings": 262144,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            _GROWTH: 0.1,
        },
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    rope_types=("yarn",),
    rope_settings={_GROWTH: 0.1, "max_position_embeddings": 1},
    shape=read_shape,
    weights=dense_weights,
)
