"""One changed setting of a model that is held, which changes what it computes: refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.errors import RequestError
from pretrainkit.models.registry import FAMILIES, family_named, read_shape

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "rope_theta": 500000.0,
    "vocab_size": 263,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0]}
GROWING = {**YARN, "llama_4_scaling_beta": 0.1}
DEFAULT = {"rope_type": "default", "rope_theta": 500000.0}
SCALED_WINDOW = {"full_attention": DEFAULT, "sliding_attention": {**YARN, "rope_theta": 500000.0}}
CHUNKS = ["chunked_attention", "full_attention"] * 2
WINDOWS = ["sliding_attention", "full_attention"] * 2
SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("apertus", {"hidden_act": "silu"}, "hidden_act"),
    ("apertus", {"post_norm": True}, "post_norm"),
    ("deepseek_v2", {"attention_bias": True}, "attention_bias"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok"),
    ("deepseek_v2", {"num_key_value_heads": 4}, "num_key_value_heads"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "n_group"),
    ("deepseek_v3", {"first_k_dense_replace": 4}, "first_k_dense_replace"),
    ("deepseek_v3", {"n_group": 3}, "n_group"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("deepseek_v3", {"rope_scaling": LLAMA3}, "llama3"),
    ("deepseek_v3", {"topk_group": 9}, "topk_group"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
    ("ernie4_5", {"hidden_act": "gelu"}, "hidden_act"),
    ("ernie4_5", {"rope_interleaved": True}, "rope_interleaved"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    ("exaone4", {"sliding_window": None, "layer_types": WINDOWS}, "layer_types"),
    ("gemma2", {"hidden_act": "relu"}, "hidden_act"),
    ("gemma2", {"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "proportional"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma4_text", {"attention_bias": True}, "attention_bias"),
    ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block"),
    ("gemma4_text", {"hidden_size_per_layer_input": "absent"}, "hidden_size_per_layer_input"),
    ("gemma4_text", {"layer_types": WINDOWS[::-1]}, "layer_types"),
    ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
    ("gemma4_text", {"per_layer_config": {"0": {"head_dim": 32}}}, "per_layer_config"),
    ("gemma4_text", {"rope_parameters": {**SCALED_WINDOW, "sliding_attention": DEFAULT}}, "rope_parameters"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("glm4", {"rope_scaling": LLAMA3}, "llama3"),
    (
        "glm4",
        {"rope_parameters": {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.5},
        "partial_rotary_factor",
    ),
    ("glm4_moe", {"first_k_dense_replace": 4}, "first_k_dense_replace"),
    ("glm4_moe", {"n_group": 3}, "n_group"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ("glm4_moe", {"rope_scaling": LLAMA3}, "llama3"),
    ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quant_method"),
    ("gpt_oss", {"rope_scaling": LLAMA3}, "llama3"),
    ("granite", {"position_embedding_type": "nope"}, "position_embedding_type"),
    ("granite", {"hidden_act": "gelu"}, "hidden_act"),
    ("granitemoe", {"hidden_act": "gelu"}, "hidden_act"),
    ("granitemoe", {"mlp_bias": True}, "mlp_bias"),
    ("granitemoe", {"position_embedding_type": "nope"}, "position_embedding_type"),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 2}, "mamba layers"),
    ("granitemoehybrid", {"layer_types": "absent"}, "mamba layers"),
    ("granitemoehybrid", {"num_local_experts": "absent"}, "num_local_experts"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "alpha": 1000.0}}, "alpha"),
    ("llama", {"rope_scaling": {**LONGROPE, "factor": 4.0}}, "longrope"),
    ("llama", {"residual_multiplier": 0.22}, "residual_multiplier"),
    ("llama4_text", {"attention_chunk_size": None, "layer_types": CHUNKS}, "attention_chunk_size"),
    ("llama4_text", {"layer_types": WINDOWS}, "layer_types"),
    ("llama4_text", {"moe_layers": []}, "moe_layers"),
    ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok"),
    ("llama4_text", {"rope_scaling": YARN}, "yarn"),
    ("llama4_text", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("ministral3", {"rope_scaling": YARN}, "llama_4_scaling_beta"),
    ("ministral3", {"rope_scaling": {**GROWING, "factor": 8.0}}, "factor 8.0"),
    ("mistral", {"layer_types": WINDOWS}, "layer_types"),
    ("mistral", {"hidden_act": "gelu"}, "hidden_act"),
    ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
    ("olmo3", {"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
    ("olmo3", {"rope_parameters": SCALED_WINDOW}, "sliding_attention"),
    ("olmo3", {"rope_theta": "absent"}, "rope_theta"),
    ("phi3", {"rope_scaling": LONGROPE}, "long_factor with 1 values"),
    (
        "phi3",
        {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 128, "rope_theta": 500000.0}},
        "4096",
    ),
    ("phi3", {"rope_scaling": YARN}, "yarn"),
    ("qwen2", {"rope_scaling": {"rope_type": "mrope", "mrope_section": [16, 24, 24]}}, "mrope"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen2_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("qwen3", {"rope_scaling": {**YARN, "factor": 8.0}}, "max_position_embeddings"),
    ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("qwen3_5_text", {"attention_bias": True}, "attention_bias"),
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
    ("qwen3_5_text", {"linear_num_value_heads": 24}, "linear_num_value_heads"),
    ("qwen3_5_text", {"rope_scaling": YARN}, "yarn"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias"),
    ("qwen3_next", {"linear_num_value_heads": 24}, "linear_num_value_heads"),
    ("qwen3_next", {"layer_types": WINDOWS}, "layer_types"),
    ("qwen3_next", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("qwen3_next", {"rope_scaling": LLAMA3}, "llama3"),
    ("seed_oss", {"logit_scale": 2.0}, "logit_scale"),
    ("seed_oss", {"rope_interleaved": True}, "rope_interleaved"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
]


def shape_of(folder: Path, family: str, changes: dict[str, Any]) -> Any:
    scaling = {"ministral3": GROWING, "gpt_oss": YARN}.get(family)
    scaled = {"rope_scaling": scaling} if scaling else {}
    none = {
        "gemma4_text": {"hidden_size_per_layer_input": 0, "rope_theta": 1000000.0},
        "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0},
    }.get(family, {})
    latent = {"num_key_value_heads": 8, "num_experts_per_tok": 2} if family.startswith("deepseek") else {}
    config = {"architectures": [*family_named(family).architectures], **SIZES, **scaled, **none, **latent, **changes}
    kept = {name: value for name, value in config.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(kept))
    return read_shape(folder)


@pytest.mark.parametrize(("family", "changes", "word"), SETTINGS, ids=[f"{name}-{word}" for name, _, word in SETTINGS])
def test_a_changed_setting_is_refused_by_name(family: str, changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    assert shape_of(tmp_path, family, {}).family == family
    with pytest.raises(RequestError) as caught:
        shape_of(tmp_path, family, changes)
    assert word in str(caught.value)


def test_every_family_is_in_the_list() -> None:
    assert {family for family, *_ in SETTINGS} == {family.name for family in FAMILIES}
