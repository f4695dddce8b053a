"""GLM-4.5: DeepSeek-V3's experts with grouped-query attention, of which a part of each head is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder
from pretrainkit.models.deepseek import check_experts, weights
from pretrainkit.models.deepseek_v3 import sigmoid_routing
from pretrainkit.models.family import ConfigFields, Family, names


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a GLM-4.5 config.json describes; `attention_bias` is of query, key and value alone."""
    routing = sigmoid_routing(config)
    check_experts(config, routing)
    return read_decoder(
        "glm4_moe",
        config,
        features={
            "output_bias": False,
            "routing": routing,
            "dense_layers": tuple(range(config["first_k_dense_replace"])),
            "shared_expert_gate": False,
        },
        qk_norm=config["use_qk_norm"],
        num_experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_ffn_hidden_size=config["moe_intermediate_size"],
        shared_expert_ffn_hidden_size=config["moe_intermediate_size"] * config["n_shared_experts"],
    )


FAMILY = Family(
    name="glm4_moe",
    architectures=("Glm4MoeForCausalLM",),
    fields=ConfigFields(
        read=names("""
            attention_bias first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts
            num_experts_per_tok partial_rotary_factor routed_scaling_factor topk_group use_qk_norm
        """),
        fixed={"norm_topk_prob": (True,)},
        ignored=names("num_nextn_predict_layers output_router_logits"),
    ),
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    rope_types=("default",),
    shape=read_shape,
    weights=weights,
)
