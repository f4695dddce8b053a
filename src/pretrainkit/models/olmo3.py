"""OLMo 3: OLMo 2 with a sliding window in three layers of four, whose rotary embeddings are never scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import read_decoder, window_features
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.olmo2 import OLMO_DEFAULTS, OLMO_FEATURES
from pretrainkit.models.weight_rows import dense_weights


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that an OLMo 3 config.json describes."""
    windows = window_features(config, lambda layer: (layer + 1) % 4 != 0)
    return read_decoder("olmo3", config, features={**OLMO_FEATURES, **windows}, qk_norm=True)


FAMILY = Family(
    name="olmo3",
    architectures=("Olmo3ForCausalLM",),
    fields=ConfigFields(read=names("attention_bias sliding_window")),
    defaults={**OLMO_DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096},
    has_layer_types=True,
    local_rope="rope_theta",
    shape=read_shape,
    weights=dense_weights,
)
