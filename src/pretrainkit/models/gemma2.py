"""Gemma 2: GeGLU, norms before and after the blocks, a window in every other layer, and soft caps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder, window_features
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.weight_rows import dense_weights

GEMMA_FIELDS = ConfigFields(
    read=names("attention_bias query_pre_attn_scalar sliding_window"),
    fixed={"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)},
    ignored=names("cache_implementation"),
)
GEMMA_DEFAULTS: Mapping[str, Any] = {
    **DECODER_DEFAULTS,
    "attention_bias": False,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def gemma_features(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the layers of Gemma 2 and 3 share."""
    return {
        "activation": "gelu",
        "norm_after": True,
        "zero_centered_norm": True,
        "attention_scale": config["query_pre_attn_scalar"] ** -0.5,
        "embedding_multiplier": config["hidden_size"] ** 0.5,
    }


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Gemma 2 config.json describes."""
    features = {
        **gemma_features(config),
        **window_features(config, lambda layer: layer % 2 == 0),
        "attention_softcap": config["attn_logit_softcapping"] or 0.0,
        "logits_softcap": config["final_logit_softcapping"] or 0.0,
    }
    return read_decoder("gemma2", config, features=features)


FAMILY = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    fields=GEMMA_FIELDS | ConfigFields(read=names("attn_logit_softcapping final_logit_softcapping")),
    defaults={
        **GEMMA_DEFAULTS,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
        "vocab_size": 256000,
    },
    has_layer_types=True,
    shape=read_shape,
    weights=partial(dense_weights, before=("input_layernorm", "pre_feedforward_layernorm")),
)
