"""Qwen3.5 with experts (text): Qwen3-Next with separate projections of its gated delta nets."""

from __future__ import annotations

from functools import partial

from pretrainkit.models import qwen2_moe, qwen3_next
from pretrainkit.models.family import FULL, LINEAR, ConfigFields, Family, names
from pretrainkit.models.qwen3_5_text import QWEN3_5_DEFAULTS, QWEN3_5_FIELDS, ROPE_SETTINGS
from pretrainkit.models.weight_rows import separate_delta_net

FAMILY = Family(
    name="qwen3_5_moe_text",
    architectures=("Qwen3_5MoeForCausalLM",),
    fields=QWEN3_5_FIELDS
    | ConfigFields(
        read=names("""
            moe_intermediate_size num_experts num_experts_per_tok router_aux_loss_coef shared_expert_intermediate_size
        """),
        fixed={"norm_topk_prob": (True,), "mlp_only_layers": ([], None)},
        ignored=names("output_router_logits"),
    ),
    defaults={
        **QWEN3_5_DEFAULTS,
        "hidden_size": 2048,
        "intermediate_size": 5632,  # of dense layers, which there are none of
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
    },
    layer_types=(FULL, LINEAR),
    rope_types=("default",),
    rope_settings=ROPE_SETTINGS,
    shape=partial(qwen3_next.read_shape, family="qwen3_5_moe_text"),
    weights=partial(qwen2_moe.weights, net=separate_delta_net),
)
