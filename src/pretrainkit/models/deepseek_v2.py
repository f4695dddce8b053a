"""DeepSeek-V2 and V2-Lite: multi-head latent attention, dense first layers, shared experts, softmax routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.layer_features import Routing
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.deepseek import DEEPSEEK_DEFAULTS, DEEPSEEK_FIELDS, read_deepseek, weights
from pretrainkit.models.family import ConfigFields, Family, names


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a DeepSeek-V2 config.json describes."""
    groups, chosen = config["n_group"], config["topk_group"]
    if config["topk_method"] == "greedy":
        groups = chosen = 1
    if groups is None or chosen is None:
        raise RequestError(
            f"n_group {groups} and topk_group {chosen}",
            where="config.json",
            needed="numbers, or topk_method 'greedy', which has no groups",
        )
    routing = Routing(
        scaling_factor=config["routed_scaling_factor"],
        num_groups=groups,
        topk_groups=chosen,
        aux_loss_by_sequence=config["seq_aux"],
    )
    return read_deepseek("deepseek_v2", config, routing, rotary_interleaved=True, norm_topk_prob=False)


FAMILY = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    fields=DEEPSEEK_FIELDS
    | ConfigFields(
        read=names("topk_method"),
        fixed={
            "mlp_bias": (False,),
            "norm_topk_prob": (False,),
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
        },
    ),
    defaults={
        **DEEPSEEK_DEFAULTS,
        "first_k_dense_replace": 0,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "moe_intermediate_size": 1407,
        "n_group": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 32,
        "num_experts_per_tok": None,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    rope_types=("default", "yarn"),
    shape=read_shape,
    weights=weights,
)
