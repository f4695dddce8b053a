"""Granite 3 with experts: Granite's factors, and one tensor for all experts of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import read_decoder, read_local_experts
from pretrainkit.models.family import ConfigFields, Family, Weight, names
from pretrainkit.models.granite import GRANITE_DEFAULTS, GRANITE_FIELDS, granite_features
from pretrainkit.models.weight_rows import moe_weights, stacked_experts


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a GraniteMoe config.json describes; the weights of a token's experts add up to 1."""
    return read_decoder("granitemoe", config, features=granite_features(config), **read_local_experts(config))


def weights(shape: ModelShape) -> tuple[Weight, ...]:
    """GraniteMoe's table."""
    block = "model.layers.{layer}.block_sparse_moe."
    experts = stacked_experts(shape, block, ("input_linear.weight", "output_linear.weight"))
    return moe_weights(shape, block=block, router="router.layer", experts=experts)


FAMILY = Family(
    name="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    fields=GRANITE_FIELDS
    | ConfigFields(
        read=names("num_experts_per_tok num_local_experts router_aux_loss_coef"),
        fixed={"position_embedding_type": ("rope",)},
        ignored=names("output_router_logits"),
    ),
    defaults={
        **GRANITE_DEFAULTS,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "router_aux_loss_coef": 0.001,
    },
    shape=read_shape,
    weights=weights,
)
