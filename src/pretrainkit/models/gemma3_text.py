"""Gemma 3 (text): Gemma 2 with norms of each query and key head, two rotary bases, and without soft caps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import read_decoder, window_features
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.gemma2 import GEMMA_DEFAULTS, GEMMA_FIELDS, gemma_features
from pretrainkit.models.weight_rows import dense_weights


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Gemma 3 config.json describes."""
    windows = window_features(config, lambda layer: bool((layer + 1) % config["sliding_window_pattern"]))
    return read_decoder("gemma3_text", config, features={**gemma_features(config), **windows}, qk_norm=True)


FAMILY = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    fields=GEMMA_FIELDS | ConfigFields(read=names("rope_local_base_freq sliding_window_pattern")),
    defaults={
        **GEMMA_DEFAULTS,
        "max_position_embeddings": 131072,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
    },
    has_layer_types=True,
    local_rope="rope_local_base_freq",
    shape=read_shape,
    weights=partial(dense_weights, before=("input_layernorm", "pre_feedforward_layernorm")),
)
