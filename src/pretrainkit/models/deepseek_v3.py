"""DeepSeek-V3 and Moonlight: DeepSeek-V2 with sigmoid routing, and biases that balance the load of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.layer_features import Routing
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.deepseek import DEEPSEEK_DEFAULTS, DEEPSEEK_FIELDS, read_deepseek, weights
from pretrainkit.models.family import ConfigFields, Family, names


def sigmoid_routing(config: Mapping[str, Any], *, aux_loss_by_sequence: bool = False) -> Routing:
    """The routing of DeepSeek-V3 and GLM-4.5, with biases of experts."""
    if config["num_experts_per_tok"] == 1:
        needed = "2 or more: Megatron-core doesn't divide the score of a single expert by itself"
        raise RequestError("num_experts_per_tok = 1 is not supported", where="config.json", needed=needed)
    return Routing(
        score_function="sigmoid",
        expert_bias=True,
        scaling_factor=config["routed_scaling_factor"],
        num_groups=config["n_group"],
        topk_groups=config["topk_group"],
        experts_per_group_score=2,
        aux_loss_by_sequence=aux_loss_by_sequence,
    )


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a DeepSeek-V3 config.json describes."""
    routing = sigmoid_routing(config, aux_loss_by_sequence=config["seq_aux"])
    interleaved = config["rope_interleave"]
    return read_deepseek("deepseek_v3", config, routing, rotary_interleaved=interleaved, norm_topk_prob=True)


FAMILY = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    fields=DEEPSEEK_FIELDS
    | ConfigFields(
        read=names("rope_interleave"),
        fixed={"norm_topk_prob": (True,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    ),
    defaults={
        **DEEPSEEK_DEFAULTS,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "vocab_size": 129280,
    },
    rope_types=("default", "yarn"),
    shape=read_shape,
    weights=weights,
)
