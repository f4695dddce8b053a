"""gpt-oss: experts with biases and a clamped SwiGLU, sinks in attention, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder, read_local_experts, window_features
from pretrainkit.models.family import ConfigFields, Family, names
from pretrainkit.models.weight_rows import stacked_moe_weights

_FEATURES = {"activation": "clamped_swiglu", "mlp_bias": True, "router_bias": True, "attention_sinks": True}


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a gpt-oss config.json describes."""
    method = (config.get("quantization_config") or {}).get("quant_method", "mxfp4")
    if method != "mxfp4":
        raise RequestError(f"quant_method {method!r} is not supported", where="config.json", needed="'mxfp4', or none")
    limits = {name: float(config[name]) for name in ("swiglu_limit", "swiglu_alpha")}
    return read_decoder(
        "gpt_oss",
        config,
        features={**window_features(config, lambda layer: layer % 2 == 0), **_FEATURES, **limits},
        **read_local_experts(config),
    )


FAMILY = Family(
    name="gpt_oss",
    architectures=("GptOssForCausalLM",),
    fields=ConfigFields(
        read=names("""
            attention_bias num_experts_per_tok num_local_experts quantization_config router_aux_loss_coef sliding_window
            swiglu_alpha swiglu_limit
        """),
        ignored=names("experts_per_token initial_context_length output_router_logits"),
    ),
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": True,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
    },
    has_layer_types=True,
    rope_types=("default", "yarn"),
    shape=read_shape,
    weights=stacked_moe_weights,
)
