"""Gemma 4 (text) without per-layer embeddings and experts: Gemma 3 with other heads in its global layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrainkit.config.layer_features import GlobalAttention
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.decoder import read_decoder
from pretrainkit.models.family import FULL, SLIDING, ConfigFields, Family, names
from pretrainkit.models.gemma2 import GEMMA_DEFAULTS
from pretrainkit.models.global_heads import global_heads
from pretrainkit.models.weight_rows import dense_weights

_MISSING = {
    "enable_moe_block": "experts next to the MLP of each layer",
    "hidden_size_per_layer_input": "per-layer embeddings (PLE)",
    "num_kv_shared_layers": "layers that attend to the keys and values of others",
}


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Gemma 4 config.json describes."""
    problems = [
        RequestError(f"{name} = {config[name]!r}: {what}", where="config.json", needed="a model without: 0 or false")
        for name, what in _MISSING.items()
        if config[name]
    ]
    count, window = config["num_hidden_layers"], config["sliding_window"]
    types = config.get("layer_types") or [SLIDING if (layer + 1) % 6 else FULL for layer in range(count - 1)] + [FULL]
    if types[-1] != FULL:
        found = f"layer_types with {types[-1]!r} for the last layer"
        problems.append(RequestError(found, where="config.json", needed=f"{FULL!r}, as which transformers computes it"))
    if config["rope_scaling"]["rope_type"] != "proportional":
        problems.append(RequestError(f"rope_parameters.{FULL}", where="config.json", needed="rope_type 'proportional'"))
    RequestError.raise_all(problems)
    local, heads = tuple(layer for layer in range(count) if types[layer] == SLIDING), global_heads(config, types)
    features = {
        "activation": "gelu",
        "norm_after": True,
        "attention_scale": 1.0,
        "embedding_multiplier": config["hidden_size"] ** 0.5,
        "logits_softcap": config["final_logit_softcapping"] or 0.0,
        "value_norm": True,
        "layer_scalar": True,
        "local_layers": local,
        "local_rope_theta": config["local_rope_theta"],
        "sliding_window": window if local and window < config["max_position_embeddings"] else 0,
        "global_attention": GlobalAttention(*heads, config["partial_rotary_factor"], config["attention_k_eq_v"]),
        "rotary_fraction": 1.0,
    }
    return read_decoder("gemma4_text", {**config, "rope_scaling": None}, features=features, qk_norm=True)


FAMILY = Family(
    name="gemma4_text",
    architectures=("Gemma4ForCausalLM",),
    fields=ConfigFields(
        read=names("""
            attention_k_eq_v enable_moe_block final_logit_softcapping global_head_dim hidden_size_per_layer_input
            num_global_key_value_heads num_kv_shared_layers partial_rotary_factor per_layer_config rope_local_base_freq
            sliding_window
        """),
        fixed={
            "attention_bias": (False,),
            "hidden_activation": ("gelu_pytorch_tanh",),
            "use_bidirectional_attention": ("vision", None),  # of the tokens of images, which no text has
        },
        ignored=names("""
            moe_intermediate_size num_experts top_k_experts use_double_wide_mlp vocab_size_per_layer_input
        """),  # of what is refused
    ),
    defaults={
        **{name: value for name, value in GEMMA_DEFAULTS.items() if name != "query_pre_attn_scalar"},
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131072,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 30,
        "num_kv_shared_layers": 0,
        "partial_rotary_factor": 0.25,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "proportional"},
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
    has_layer_types=True,
    rope_types=("default", "proportional"),
    local_rope="rope_local_base_freq",
    shape=read_shape,
    weights=partial(dense_weights, before=("input_layernorm", "pre_feedforward_layernorm")),
)
