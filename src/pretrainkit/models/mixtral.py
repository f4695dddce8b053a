"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder, read_local_experts, window_features
from pretrainkit.models.family import ConfigFields, Family, NemoClasses, names
from pretrainkit.models.weight_rows import moe_weights


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Mixtral config.json describes."""
    return read_decoder(
        "mixtral",
        config,
        features=window_features(config),
        **read_local_experts(config),
    )


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    fields=ConfigFields(
        read=names("sliding_window num_local_experts num_experts_per_tok router_aux_loss_coef"),
        fixed={"router_jitter_noise": (0.0, None)},
        ignored=names("output_router_logits"),
    ),
    defaults={
        **DECODER_DEFAULTS,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    shape=read_shape,
    weights=partial(moe_weights, block="model.layers.{layer}.block_sparse_moe.", names=("w1", "w3", "w2")),
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.mixtral:MixtralModel",
        config="nemo.collections.llm.gpt.model.mixtral:MixtralConfig",
    ),
)
