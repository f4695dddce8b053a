"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import moe_weights, read_decoder
from pretrainkit.models.family import ConfigFields, Family, NemoClasses, names


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Mixtral config.json describes; `intermediate_size` is that of one expert."""
    return read_decoder(
        "mixtral",
        config,
        has_sliding_window=True,
        num_experts=config.get("num_local_experts", 8),
        experts_per_token=config.get("num_experts_per_tok", 2),
        expert_ffn_hidden_size=config.get("intermediate_size", 0),
        router_aux_loss_coef=config.get("router_aux_loss_coef", 0.001),
    )


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    fields=ConfigFields(
        read=names("sliding_window num_local_experts num_experts_per_tok router_aux_loss_coef"),
        fixed={"router_jitter_noise": (0.0, None)},
        ignored=names("output_router_logits"),
    ),
    shape=read_shape,
    weights=partial(moe_weights, block="model.layers.{layer}.block_sparse_moe.", names=("w1", "w3", "w2")),
    nemo=NemoClasses(
        model="nemo.collections.llm.gpt.model.mixtral:MixtralModel",
        config="nemo.collections.llm.gpt.model.mixtral:MixtralConfig",
    ),
)
