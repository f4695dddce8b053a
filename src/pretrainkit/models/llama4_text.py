"""Llama 4 (text): chunked attention, layers without rotary embeddings, and experts whose inputs are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pretrainkit.config.layer_features import Routing
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.decoder import DECODER_DEFAULTS, read_decoder, read_local_experts
from pretrainkit.models.family import FULL, ConfigFields, Family, Weight, names
from pretrainkit.models.weight_rows import gated_mlp, moe_weights, stacked_experts

_CHUNKED = "chunked_attention"


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Llama 4 config.json describes."""
    count, chunk, step = (config[n] for n in ("num_hidden_layers", "attention_chunk_size", "interleave_moe_layer_step"))
    interval, sparse = config["no_rope_layer_interval"], config.get("moe_layers")
    has_rope = config.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    sparse = [*range(step - 1, count, step)] if sparse is None else sparse
    types = config.get("layer_types") or [_CHUNKED if rope and chunk is not None else FULL for rope in has_rope]
    local = tuple(layer for layer, kind in enumerate(types) if kind == _CHUNKED)
    is_list = isinstance(has_rope, list) and len(has_rope) == count and all(value in (0, 1) for value in has_rope)
    is_known = isinstance(sparse, list) and bool(sparse) and all(layer in range(count) for layer in sparse)
    for name, holds, needed in (
        ("no_rope_layers", is_list, f"0 or 1 for each of the {count} layers"),
        ("moe_layers", is_known, f"numbers of layers, 0 to {count - 1}"),
        ("num_experts_per_tok", config["num_experts_per_tok"] == 1, "1: of more, no layer scales the inputs"),
        ("attention_chunk_size", chunk is not None or not local, "the tokens of a chunk, as layer_types has chunks"),
    ):
        if not holds:
            raise RequestError(f"{name} = {config.get(name)!r} is not supported", where="config.json", needed=needed)
    features = {
        "routing": Routing(score_function="sigmoid", scales_input=True),
        "dense_layers": tuple(layer for layer in range(count) if layer not in sparse),
        "shared_expert_gate": False,
        "local_layers": local,
        "attention_chunk": chunk if local else 0,
        "nope_layers": tuple(layer for layer, rope in enumerate(has_rope) if not rope),
        "rotary_interleaved": True,
        "qk_l2_norm": config["use_qk_norm"],
    }
    if config["attn_temperature_tuning"] and features["nope_layers"]:
        growth = {"query_growth": config["attn_scale"], "query_span": config["floor_scale"], "query_offset": 1}
        features |= growth
    experts = {**read_local_experts(config), "shared_expert_ffn_hidden_size": config["intermediate_size"]}
    dense = {**config, "intermediate_size": config["intermediate_size_mlp"]}
    return read_decoder("llama4_text", dense, features=features, **experts)


def weights(shape: ModelShape) -> tuple[Weight, ...]:
    """Llama 4's table: one tensor for all experts of a layer, and a shared expert without a gate."""
    ours, theirs = "decoder.layers.{layer}.mlp.shared_experts.", "model.layers.{layer}.feed_forward."
    shared = gated_mlp(shape, ours, theirs + "shared_expert.", ffn_hidden_size=shape.shared_expert_ffn_hidden_size)
    experts = stacked_experts(shape, theirs + "experts.", is_transposed=True)
    return moe_weights(shape, block=theirs, router="router", experts=experts, more=shared)


FAMILY = Family(
    name="llama4_text",
    architectures=("Llama4ForCausalLM",),
    fields=ConfigFields(
        read=names("""
            attention_bias attention_chunk_size attn_scale attn_temperature_tuning floor_scale intermediate_size_mlp
            interleave_moe_layer_step moe_layers no_rope_layer_interval no_rope_layers num_experts_per_tok
            num_local_experts router_aux_loss_coef use_qk_norm
        """),
        fixed={"router_jitter_noise": (0.0,), "for_llm_compressor": (False,)},
        ignored=names("output_router_logits"),
    ),
    defaults={
        **DECODER_DEFAULTS,
        **{"attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True},
        **{"floor_scale": 8192, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 8192},
        **{"intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1, "max_position_embeddings": 131072},
        **{"no_rope_layer_interval": 4, "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48},
        **{"num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-05, "rope_theta": 500000.0},
        **{"router_aux_loss_coef": 0.001, "use_qk_norm": True, "vocab_size": 202048},
    },
    layer_types=(FULL, _CHUNKED),
    rope_types=("default", "linear", "llama3"),
    shape=read_shape,
    weights=weights,
)
