"""Gemma 3 (text): GeGLU, norms before and after the blocks, windows, and two rotary bases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder, window_features
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.weight_rows import dense_weights


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Gemma 3 config.json describes."""
    features = {
        "activation": "gelu",
        "norm_after": True,
        "zero_centered_norm": True,
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        "embedding_multiplier": config["hidden_size"] ** 0.5,
        **window_features(config, lambda layer: bool((layer + 1) % config["sliding_window_pattern"])),
    }
    return read_decoder("gemma3_text", config, features=features, qk_norm=True)


FAMILY = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    fields=ConfigFields(
        read=names("attention_bias query_pre_attn_scalar rope_local_base_freq sliding_window sliding_window_pattern"),
        fixed={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)},
        ignored=names("cache_implementation"),
    ),
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "vocab_size": 262208,
    },
    has_layer_types=True,
    local_rope="rope_local_base_freq",
    shape=read_shape,
    weights=partial(dense_weights, before=("input_layernorm", "pre_feedforward_layernorm")),
)
