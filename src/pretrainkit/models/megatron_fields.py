"""A model shape as fields of Megatron-core, NeMo and Megatron-LM: one table, and the names that differ.

| software | what the fields are | how they are derived |
|---|---|---|
| Megatron-core | keyword arguments of `TransformerConfig` | the table |
| NeMo | keyword arguments of a family's config class, which extends `TransformerConfig` | the table, embeddings, rope |
| Megatron-LM | command-line arguments, which its checkpoints keep | the table renamed, embeddings, rope |

All values are plain: numbers, strings and booleans. What depends on the run and not on the model (dtypes, sequence
length, parallel sizes, kernels) is added by the caller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pretrainkit.config.layer_features import LLAMA, LatentAttention, Routing
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.family import names
from pretrainkit.models.registry import family_named

_MEGATRON_LM_NAMES = {
    "layernorm_epsilon": "norm_epsilon",
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
}
"""Fields of TransformerConfig that Megatron-LM's arguments call otherwise."""

_ARCHITECTURE = names("""
    num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon
    norm_epsilon rotary_base rope_scaling_factor share_embeddings_and_output_weights moe_router_topk moe_ffn_hidden_size
    untie_embeddings_and_output_weights add_qkv_bias qk_layernorm num_moe_experts num_experts q_lora_rank kv_lora_rank
    qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor mscale mscale_all_dim
""")
"""Fields that decide what a model computes, under NeMo's and Megatron-LM's names."""
NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(names("""
        scale_factor low_freq_factor high_freq_factor old_context_len use_rope_scaling window_size rotary_interleaved
        seq_len_interpolation_factor rotary_seq_len_interpolation_factor squared_relu apply_layernorm_1p
        layernorm_zero_centered_gamma multi_latent_attention moe_router_pre_softmax moe_shared_expert_gate
        moe_shared_expert_intermediate_size moe_router_enable_expert_bias moe_router_num_groups moe_router_group_topk
        moe_router_topk_scaling_factor features rope_scaling
    """)),
    "rotary_percent": 1.0,
    "moe_router_score_function": "softmax",
}  # fmt: skip
"""Further such fields, with the value (None: off) at which a model has nothing of the kind, and which those that are
absent have in Megatron-core, Megatron-LM and NeMo's base class."""

OUR_CONFIG = "pretrainkit.engine.gpt_config:LayerFeaturesConfig"
"""NeMo's config class for what none of its own computes."""
_GPT_MODEL = "nemo.collections.llm.gpt.model.base:GPTModel"

_MEGATRON_LM_EXPERTS = {"moe_router_load_balancing_type": "aux_loss", "moe_layer_freq": 1}
_MEGATRON_LM_ROPE = {
    "kind": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The constants behind Megatron-LM's --use-rope-scaling; only the factor is an argument."""
_MEGATRON_LM_YARN = {
    "kind": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "original_max_position_embeddings": 4096,
}
"""Those behind its --rope-type yarn of latent attention; the factor and two weights of it are arguments."""


@dataclass(frozen=True)
class NemoModel:
    """NeMo's classes for a model, each as `module:name`, and the arguments of the config class."""

    model_class: str
    config_class: str
    fields: dict[str, Any]


def transformer_config_fields(shape: ModelShape) -> dict[str, Any]:
    """Keyword arguments for Megatron-core's TransformerConfig that describe `shape`, without its features.

    The activation is SiLU; `activation_func` is a function and therefore left to the caller, and so are the features
    (`pretrainkit.megatron.features`).
    """
    fields = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "init_method_std": shape.initializer_range,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if shape.num_experts:
        fields |= {
            "num_moe_experts": shape.num_experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.expert_ffn_hidden_size,
            "moe_router_pre_softmax": not shape.norm_topk_prob,
            "moe_aux_loss_coeff": shape.router_aux_loss_coef,
            "moe_shared_expert_intermediate_size": shape.shared_expert_ffn_hidden_size or None,
            "moe_shared_expert_gate": bool(shape.shared_expert_ffn_hidden_size) and shape.features.shared_expert_gate,
        }
    return fields


def nemo_config_fields(shape: ModelShape) -> dict[str, Any]:
    """Keyword arguments for NeMo's config class of the family that describe `shape`.

    `seq_length` is the model's context length: NeMo's exporters write it as max_position_embeddings.
    """
    fields = {
        **transformer_config_fields(shape),
        "seq_length": shape.max_position_embeddings,
        "rotary_base": shape.rope_theta,
        "share_embeddings_and_output_weights": shape.tie_word_embeddings,
    }
    if _needs_our_config(shape):
        # As text: a context holds plain values. Without what only longrope has: other scalings' text is as it was.
        stated = asdict(shape.rope_scaling) if shape.rope_scaling else {}
        text = json.dumps({name: value for name, value in stated.items() if value != ()}) if stated else ""
        fields |= {"features": shape.features.to_json(), "rope_scaling": text}
    elif scaling := shape.rope_scaling:
        fields |= {
            "scale_factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "old_context_len": scaling.original_max_position_embeddings,
        }
    return fields


def nemo_model(shape: ModelShape) -> NemoModel:
    """The classes that compute `shape` in NeMo: its own, or where it has none a config class of this package."""
    classes = family_named(shape.family).nemo
    if classes is None or _needs_our_config(shape):
        return NemoModel(_GPT_MODEL, OUR_CONFIG, nemo_config_fields(shape))
    config_class = classes.scaled_rope_config if shape.rope_scaling else classes.config
    context_length = {classes.context_length_field: shape.max_position_embeddings}
    return NemoModel(classes.model, config_class, {**nemo_config_fields(shape), **context_length, **classes.fields})


def _needs_our_config(shape: ModelShape) -> bool:
    """Whether NeMo has no config class that computes `shape`."""
    classes, scaling = family_named(shape.family).nemo, shape.rope_scaling
    scales = scaling is None or (scaling.kind == "llama3" and classes is not None and classes.scaled_rope_config != "")
    return classes is None or not scales or shape.features != LLAMA


def megatron_lm_arguments(shape: ModelShape) -> dict[str, Any]:
    """The command-line arguments of Megatron-LM that describe `shape`, by name.

    Raises RequestError when Megatron-LM can't express the model's rotary scaling or features of its layers.
    """
    is_latent = shape.features.latent_attention is not None
    if features := ", ".join(_beyond_latent_attention(shape)) if is_latent else shape.features.names():
        raise RequestError(
            f"Megatron-LM's arguments can't express {features} ({shape.family})",
            where="target format",
            needed="a format that can",
            action="use the format nemo",
        )
    return {
        **{_MEGATRON_LM_NAMES.get(name, name): value for name, value in transformer_config_fields(shape).items()},
        **(_MEGATRON_LM_EXPERTS if shape.num_experts else {"num_experts": None}),
        **_megatron_lm_rope(replace(shape, rope_scaling=None) if is_latent else shape),
        **(_megatron_lm_latent_attention(shape) if is_latent else {}),
        "encoder_num_layers": shape.num_layers,
        "group_query_attention": shape.num_query_groups != shape.num_attention_heads,
        "seq_length": shape.max_position_embeddings,
        "max_position_embeddings": shape.max_position_embeddings,
        "squared_relu": False,
        "apply_layernorm_1p": False,
        "untie_embeddings_and_output_weights": not shape.tie_word_embeddings,
        "vocab_size": shape.vocab_size,
    }


def _beyond_latent_attention(shape: ModelShape) -> Iterator[str]:
    """What a model with latent attention has that Megatron-LM's arguments for it can't express, in words."""
    features, latent, routing, scaling = shape.features, *_latent_parts(shape), shape.rope_scaling
    others = replace(
        features, latent_attention=None, routing=None, dense_layers=(), shared_expert_gate=True, attention_scale=None
    )
    if names := replace(others, rotary_interleaved=False).names():
        yield names
    if latent.norm_eps != shape.rms_norm_eps:
        yield f"norms of latent vectors with an epsilon of {latent.norm_eps:g}, and others with {shape.rms_norm_eps:g}"
    if not features.rotary_interleaved:
        yield "latent attention without interleaved rotary embeddings"
    if routing.num_groups > 1 and shape.experts_per_token // routing.topk_groups != routing.experts_per_group_score:
        yield f"groups of experts whose score is that of {routing.experts_per_group_score}"
    found = asdict(scaling) if scaling else {}
    for name, value in _MEGATRON_LM_YARN.items():
        if scaling and found[name] != value:
            yield f"{name} {found[name]}"


def _latent_parts(shape: ModelShape) -> tuple[LatentAttention, Routing]:
    assert shape.features.latent_attention
    return shape.features.latent_attention, shape.features.routing or Routing()


def _megatron_lm_latent_attention(shape: ModelShape) -> dict[str, Any]:
    """Megatron-LM's arguments for latent attention and its routing."""
    (latent, routing), scaling, groups = _latent_parts(shape), shape.rope_scaling, {}
    if routing.num_groups > 1:
        groups = {"moe_router_num_groups": routing.num_groups, "moe_router_group_topk": routing.topk_groups}
    dense = shape.features.dense_layers
    rope: dict[str, Any] = {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    if scaling:
        # A score has the square of 1 + 0.1 x mscale_all_dim x log(factor); angles have the quotient of it with mscale.
        root = math.sqrt((shape.features.attention_scale or shape.head_dim**-0.5) * math.sqrt(shape.head_dim))
        weights = (scaling.attention_factor * root, root)
        mscale, mscale_all_dim = (round((weight - 1) / (0.1 * math.log(scaling.factor)), 9) for weight in weights)
        rope = {"rope_type": "yarn", "mscale": mscale, "mscale_all_dim": mscale_all_dim}
        rope["rotary_scaling_factor"] = scaling.factor
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,  # of the latent vectors
        "q_lora_rank": latent.q_lora_rank or None,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": shape.head_dim - latent.qk_rope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        **rope,
        "moe_router_score_function": routing.score_function,
        "moe_router_enable_expert_bias": routing.expert_bias,
        "moe_router_topk_scaling_factor": routing.scaling_factor if routing.scaling_factor != 1 else None,
        "moe_router_load_balancing_type": "seq_aux_loss" if routing.aux_loss_by_sequence else "aux_loss",
        **groups,
        "moe_layer_freq": [int(layer not in dense) for layer in range(shape.num_layers)] if dense else 1,
    }


def _megatron_lm_rope(shape: ModelShape) -> dict[str, Any]:
    fields = {
        "position_embedding_type": "rope",
        "add_position_embedding": True,  # Megatron-LM's default, which it compares; with rope it adds none
        "use_rotary_position_embeddings": True,
        "rotary_base": int(shape.rope_theta) if shape.rope_theta.is_integer() else shape.rope_theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": shape.rope_scaling is not None,
    }
    if shape.rope_scaling is None:
        return fields
    found = asdict(shape.rope_scaling)
    wrong = {name: value for name, value in _MEGATRON_LM_ROPE.items() if found[name] != value}
    if wrong:
        raise RequestError(
            "Megatron-LM can't express " + ", ".join(f"{name} {found[name]}" for name in wrong),
            where="rope_scaling",
            needed=", ".join(f"{name} {value}" for name, value in wrong.items()),
            action="use the format nemo",
        )
    return {**fields, "rope_scaling_factor": shape.rope_scaling.factor}


def check_stored(
    stored: Mapping[str, Any], expected: Mapping[str, Any], where: object, *, absent: Mapping[str, Any]
) -> None:
    """Raise RequestError when fields stored in a checkpoint contradict the ones expected from config.json.

    `absent` are the values of fields that aren't stored, as far as they are known. Sizes are compared where both sides
    have one (shapes of tensors show the others), fields of NEUTRAL also where a side has none.
    """
    problems = []
    for name in sorted({*_ARCHITECTURE, *NEUTRAL} & {*stored, *absent}):
        found, meant = stored.get(name, absent.get(name)), expected.get(name, NEUTRAL.get(name))
        is_comparable = name in NEUTRAL or (isinstance(found, (bool, int, float, str)) and meant is not None)
        if is_comparable and (found or None) != (meant or None):
            how = "" if name in stored else " (not stored, so the default counts)"
            problems.append(f"{name} is {found!r} in the checkpoint and {meant!r} by config.json{how}")
    if problems:
        raise RequestError(
            "; ".join(problems), where=str(where), needed="the config.json of the model in this checkpoint"
        )
