"""GLM-4 (0414): norms before and after the blocks, and half of each head rotated, by neighbouring dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.weight_rows import dense_weights, gated_mlp


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a GLM-4 config.json describes: attention_bias is not the output projection's."""
    features = {"norm_after": True, "output_bias": False, "rotary_interleaved": True}
    return read_decoder("glm4", config, features=features)


FAMILY = Family(
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    fields=ConfigFields(read=names("attention_bias partial_rotary_factor")),
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": True,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "vocab_size": 151552,
    },
    rope_types=("default",),
    shape=read_shape,
    weights=partial(
        dense_weights,
        after=("post_self_attn_layernorm", "post_mlp_layernorm"),
        mlp=partial(gated_mlp, names=("gate_up_proj", "down_proj")),
    ),
)
