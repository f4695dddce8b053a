"""What decoder-only families share: fields of config.json, their defaults, and reading them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from pretrainkit.config.layer_features import LayerFeatures
from pretrainkit.config.schema import ModelShape, RopeScaling
from pretrainkit.errors import RequestError
from pretrainkit.models.family import SLIDING, ConfigFields, names

_READ = names("""
    head_dim hidden_size initializer_range intermediate_size layer_types max_position_embeddings num_attention_heads
    num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings
    vocab_size
""")
_METADATA = names("""
    architectures auto_map dtype is_llama_config model_type torch_dtype transformers.js_config transformers_version
    unsloth_fixed unsloth_version
""")
_GENERATION = names("""
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores prefix remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens temperature tokenizer_class top_k top_p typical_p
""")
_OTHER_TASKS = names("""
    cross_attention_hidden_size finetuning_task id2label label2id output_attentions output_hidden_states problem_type
    return_dict task_specific_params tf_legacy_loss tie_encoder_decoder torchscript use_bfloat16 use_cache
""")
_DROPOUT = names("attention_dropout hidden_dropout embd_pdrop resid_pdrop")

DECODER_FIELDS = ConfigFields(
    read=_READ,
    fixed={
        "hidden_act": ("silu",),
        "quantization_config": (None,),
        "pretraining_tp": (1, None),
        "is_decoder": (None, True, False),
        "add_cross_attention": (None, False),
        "chunk_size_feed_forward": (0,),
        "pruned_heads": ({},),
        "is_encoder_decoder": (False,),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "rope_interleaved": (False,),
        "partial_rotary_factor": (1.0, 1, None),
    },
    ignored=_METADATA | _GENERATION | _OTHER_TASKS | _DROPOUT,
)
"""Fields of every family: `read_decoder` reads them, or they don't affect a forward pass without dropout.

Private fields (`_name_or_path`) and ids of special tokens (`eos_token_id`) are ignored by their form.
"""

BIAS_FIELDS = ConfigFields(read=names("attention_bias mlp_bias"))
"""Fields of families whose projections may have biases: of query, key, value and output; of gate, up and down."""

QWEN_FIELDS = ConfigFields(
    fixed={"use_sliding_window": (False, None)},
    ignored=names("sliding_window max_window_layers use_mrope"),  # no effect without use_sliding_window
)
"""Fields of Qwen's models in addition to those of every decoder; without sliding windows."""

QWEN_WINDOW_FIELDS = QWEN_FIELDS | ConfigFields(read=names("use_sliding_window sliding_window max_window_layers"))
"""The same with sliding windows."""

QWEN_MOE_FIELDS = QWEN_FIELDS | ConfigFields(
    read=names("num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob router_aux_loss_coef"),
    fixed={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},  # experts in every layer
    ignored=names("output_router_logits"),
)
"""Fields of Qwen's mixtures of experts in addition to those of every decoder."""

DECODER_DEFAULTS: Mapping[str, Any] = {
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""Defaults of fields that the config classes of the families share, if not given otherwise.

Those of the sizes differ. A test compares every family's with the config classes of both generations of transformers.
"""

QWEN_DEFAULTS: Mapping[str, Any] = {
    **DECODER_DEFAULTS,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""Defaults of Qwen's models."""

QWEN_WINDOW_DEFAULTS: Mapping[str, Any] = {**QWEN_DEFAULTS, "max_window_layers": 28, "sliding_window": None}
"""Those of the dense ones, with sliding windows."""

QWEN_MOE_DEFAULTS: Mapping[str, Any] = {
    **QWEN_DEFAULTS,
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
    "num_hidden_layers": 24,
    "router_aux_loss_coef": 0.001,
}
"""Defaults of Qwen's mixtures of experts."""


def read_qwen_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    """The expert fields of a ModelShape, as Qwen's configs name them."""
    return {
        "num_experts": config["num_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "expert_ffn_hidden_size": config["moe_intermediate_size"],
        "norm_topk_prob": config["norm_topk_prob"],
        "router_aux_loss_coef": config["router_aux_loss_coef"],
    }


def read_local_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same as Mixtral's and gpt-oss's configs name them; `intermediate_size` is that of one expert."""
    return {
        "num_experts": config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "expert_ffn_hidden_size": config["intermediate_size"],
        "router_aux_loss_coef": config["router_aux_loss_coef"],
    }


def read_decoder(
    family: str, config: Mapping[str, Any], *, features: Mapping[str, Any] | None = None, **extra: Any
) -> ModelShape:
    """A ModelShape from the fields that all decoder families share; `features` and `extra` add fields.

    `config` is what `hf_config.read_fields` gives. Of what layers may have, `features` are those that a family has
    otherwise than by the fields of BIAS_FIELDS and `partial_rotary_factor`.
    """
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"]
    if heads % groups:
        raise RequestError(
            f"{heads} attention heads don't divide into {groups} key/value heads",
            where="config.json",
            needed="num_attention_heads a multiple of num_key_value_heads",
        )
    bias = bool(config.get("attention_bias"))
    found = {
        "output_bias": bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "rotary_fraction": float(config.get("partial_rotary_factor") or 1),
        **(features or {}),
    }
    return ModelShape(
        family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
        tie_word_embeddings=config["tie_word_embeddings"],
        rope_scaling=_rope_scaling(config["rope_scaling"], config["max_position_embeddings"]),
        initializer_range=config["initializer_range"],
        features=LayerFeatures(**found),
        **{"qkv_bias": bias, **extra},
    )


def _rope_scaling(stated: Mapping[str, Any] | None, context: int) -> RopeScaling | None:
    """A scaling as `hf_config` reads it, in a context of so many tokens."""
    if not stated:
        return None
    fields = {"kind": stated["rope_type"], **stated}
    if stated["rope_type"] == "longrope":  # transformers: modeling_rope_utils._compute_longrope_parameters
        before = stated["original_max_position_embeddings"]
        fields["factor"] = context / before
        fields["attention_factor"] = math.sqrt(1 + max(math.log(context / before), 0) / math.log(before))
    factor = fields["factor"]
    if stated["rope_type"] == "yarn" and stated.get("attention_factor") is None:
        # transformers: modeling_rope_utils._compute_yarn_parameters
        scales: Any = stated.get("mscale"), stated.get("mscale_all_dim")
        weights = scales if all(scales) else (1.0, 0.0)
        fields["attention_factor"] = yarn_scale(factor, weights[0]) / yarn_scale(factor, weights[1])
    known: dict[str, Any] = {field.name: type(field.default) for field in dataclasses.fields(RopeScaling)}
    return RopeScaling(**{name: known[name](value) for name, value in fields.items() if name in known})


def yarn_scale(factor: float, weight: float) -> float:
    """What YaRN multiplies by for a context that grows by `factor`."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def window_features(
    config: Mapping[str, Any], has_window: Callable[[int], bool] = lambda layer: True
) -> dict[str, Any]:
    """The LayerFeatures of layers with a window: those of `layer_types`, or those for which `has_window` holds.

    A window that covers the context changes nothing, and is left out.
    """
    types, layers = config.get("layer_types"), range(config["num_hidden_layers"])
    windowed = tuple(layer for layer in layers if (types[layer] == SLIDING if types else has_window(layer)))
    window = config["sliding_window"]
    if types and windowed and window is None:
        raise RequestError(
            f"layer_types has {SLIDING!r}, and there is no window",
            where="config.json",
            needed="a sliding_window (in Qwen's models with use_sliding_window true), or full_attention for all layers",
        )
    if window is None or not windowed:
        return {}
    base, scaling = config.get("local_rope_theta"), config["rope_scaling"]
    found: dict[str, Any] = {}
    if window < config["max_position_embeddings"]:
        found["sliding_window"] = window
    if base is not None and (scaling or base != config["rope_theta"]):
        found["local_rope_theta"] = base
    return {**found, "local_layers": windowed} if found else {}


def read_qwen(family: str, config: Mapping[str, Any], **extra: Any) -> ModelShape:
    """A ModelShape as `read_decoder` gives it, with the windows of Qwen's dense models."""
    uses_windows = config["use_sliding_window"]
    if uses_windows and config["sliding_window"] is None:
        raise RequestError(
            "use_sliding_window is true, and there is no sliding_window",
            where="config.json",
            needed="the window's tokens, or use_sliding_window false",
        )
    window = config["sliding_window"] if uses_windows else None
    features = window_features(
        {**config, "sliding_window": window}, lambda layer: bool(window) and layer >= config["max_window_layers"]
    )
    return read_decoder(family, config, features=features, **extra)
