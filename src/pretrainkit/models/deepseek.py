"""What DeepSeek's families share: fields of config.json, their defaults, and reading them; their weight table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.layer_features import LatentAttention, Routing
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder, yarn_scale
from pretrainkit.models.family import ConfigFields, Weight, names
from pretrainkit.models.weight_rows import gated_mlp, moe_weights

DEEPSEEK_FIELDS = ConfigFields(
    read=names("""
        aux_loss_alpha first_k_dense_replace kv_lora_rank moe_intermediate_size n_group n_routed_experts
        n_shared_experts num_experts_per_tok q_lora_rank qk_nope_head_dim qk_rope_head_dim routed_scaling_factor
        seq_aux topk_group v_head_dim
    """),
    fixed={"attention_bias": (False,), "moe_layer_freq": (1,)},
    # The size of a head follows from others; parts that predict further tokens are not of the model itself.
    ignored=names("ep_size num_nextn_predict_layers output_router_logits qk_head_dim"),
)
DEEPSEEK_DEFAULTS: Mapping[str, Any] = {
    **DECODER_DEFAULTS,
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "seq_aux": True,
    "v_head_dim": 128,
}


def read_deepseek(
    family: str, config: Mapping[str, Any], routing: Routing, *, rotary_interleaved: bool, norm_topk_prob: bool
) -> ModelShape:
    """The shape that a config.json of DeepSeek describes; `routing` is without what all of them have."""
    heads, head_dim = config["num_attention_heads"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    scaling = config["rope_scaling"] or {}
    _require(config["num_key_value_heads"] == heads, config, "num_key_value_heads", f"{heads}, as many as heads")
    check_experts(config, routing)
    weight = scaling.get("mscale_all_dim") or 0.0
    features = {
        "latent_attention": LatentAttention(
            config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"], config["q_lora_rank"] or 0
        ),
        "routing": routing,
        "dense_layers": tuple(range(config["first_k_dense_replace"])),
        "shared_expert_gate": False,
        "rotary_interleaved": rotary_interleaved,
        "attention_scale": head_dim**-0.5 * yarn_scale(scaling["factor"], weight) ** 2 if weight else None,
    }
    return read_decoder(
        family,
        {**config, "head_dim": head_dim},
        features=features,
        num_experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        expert_ffn_hidden_size=config["moe_intermediate_size"],
        shared_expert_ffn_hidden_size=config["moe_intermediate_size"] * config["n_shared_experts"],
        norm_topk_prob=norm_topk_prob,
        router_aux_loss_coef=config["aux_loss_alpha"],
    )


def check_experts(config: Mapping[str, Any], routing: Routing) -> None:
    """Raise RequestError for groups of experts and dense layers that a model can't have."""
    experts, layers, dense = (config[n] for n in ("n_routed_experts", "num_hidden_layers", "first_k_dense_replace"))
    groups, chosen, topk = routing.num_groups, routing.topk_groups, config["num_experts_per_tok"]
    _require(dense < layers, config, "first_k_dense_replace", f"less than the {layers} layers")
    _require(experts % groups == 0, config, "n_group", f"a divisor of the {experts} experts")
    _require(experts // groups >= routing.experts_per_group_score, config, "n_group", "2 experts or more in each")
    _require(chosen <= groups, config, "topk_group", f"at most n_group = {groups}")
    most = chosen * experts // groups
    _require(topk is not None and topk <= most, config, "num_experts_per_tok", f"1 to {most}, as chosen groups have")


def _require(holds: bool, config: Mapping[str, Any], name: str, needed: str) -> None:
    if not holds:
        raise RequestError(f"{name} = {config[name]!r} is not supported", where="config.json", needed=needed)


def weights(shape: ModelShape) -> tuple[Weight, ...]:
    """The table of a DeepSeek model; several shared experts are one."""
    ours, theirs = "decoder.layers.{layer}.mlp.shared_experts.", "model.layers.{layer}.mlp.shared_experts."
    shared = gated_mlp(shape, ours, theirs, ffn_hidden_size=shape.shared_expert_ffn_hidden_size)
    return moe_weights(shape, more=shared)
