"""Granite 4 (dense): Granite's factors, and rotary embeddings in all layers or in none; without mamba and experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.decoder import read_decoder
from pretrainkit.models.family import FULL, LINEAR, ConfigFields, Family, names
from pretrainkit.models.granite import GRANITE_DEFAULTS, GRANITE_FIELDS, granite_features
from pretrainkit.models.weight_rows import dense_weights, gated_mlp

_ATTENTION, _MAMBA = ("attention", FULL), ("mamba", LINEAR)
"""What transformers 4 and 5 call layers."""


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a GraniteMoeHybrid config.json describes: of layers with attention and a dense MLP."""
    layers, types = range(config["num_hidden_layers"]), config.get("layer_types")
    problems = []
    if not types or any(kind in _MAMBA for kind in types):
        found = f"layer_types = {types!r}: mamba layers, which no layer computes"
        problems.append(RequestError(found, where="config.json", needed=f"{_ATTENTION[0]!r} for each layer"))
    if config["num_local_experts"]:
        found = f"num_local_experts = {config['num_local_experts']!r}: experts next to the MLP of each layer"
        problems.append(RequestError(found, where="config.json", needed="0"))
    RequestError.raise_all(problems)
    has_rotary = config.get("position_embedding_type") == "rope"
    features = {**granite_features(config), "nope_layers": () if has_rotary else tuple(layers)}
    dense = {**config, "intermediate_size": config["shared_intermediate_size"]}
    return read_decoder("granitemoehybrid", dense, features=features)


_mlp = partial(gated_mlp, theirs="model.layers.{layer}.shared_mlp.", names=("input_linear", "output_linear"))

FAMILY = Family(
    name="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    fields=GRANITE_FIELDS
    | ConfigFields(
        read=names("num_local_experts shared_intermediate_size"),
        fixed={"position_embedding_type": ("rope", "nope", None)},
        # Of mamba layers and experts.
        ignored=names("""
            mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups
            mamba_n_heads mamba_proj_bias num_experts_per_tok output_router_logits router_aux_loss_coef time_step_limit
        """),
    ),
    defaults={**GRANITE_DEFAULTS, "num_local_experts": 8, "shared_intermediate_size": 1024},
    layer_types=(*_ATTENTION, *_MAMBA),
    old_layer_types={FULL: "attention"},
    shape=read_shape,
    weights=partial(dense_weights, mlp=_mlp),
)
