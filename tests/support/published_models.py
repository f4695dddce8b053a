"""Published models that ship with a config: what their config.json on the hub says, and how many parameters they have.

Fields without effect on shape or arithmetic are left out. The numbers of parameters are those of the hub's pages.
One is no published model, but the first layers of one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
}
_LLAMA_3: dict[str, Any] = {
    **_LLAMA,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN_2: dict[str, Any] = {
    **_QWEN,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "use_mrope": False,
}
_QWEN_3_MOE: dict[str, Any] = {
    **_QWEN,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 32768,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "rope_scaling": {**_LLAMA_3_ROPE, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "models/Llama-3.1-70B-56-layers": {
        **_LLAMA_3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 56,
        "rope_scaling": {**_LLAMA_3_ROPE, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-1B": {
        **_LLAMA_3,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "rope_scaling": {**_LLAMA_3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-0.5B": {
        **_QWEN_2,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "sliding_window": 32768,
    },
    "Qwen/Qwen2.5-1.5B": {
        **_QWEN_2,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "sliding_window": 131072,
    },
    "Qwen/Qwen3-0.6B-Base": {
        **_QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
    },
    "HuggingFaceTB/SmolLM2-135M": {
        **_LLAMA,
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "Qwen/Qwen3-30B-A3B-Base": {**_QWEN_3_MOE, "num_hidden_layers": 48},
    "models/Qwen3-30B-A3B-4-layers": {**_QWEN_3_MOE, "num_hidden_layers": 4},
    "mistralai/Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "openai/gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
}
"""By hub name, as `hf_model_id` of configs/model names it."""
PARAMETERS = {
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "models/Llama-3.1-70B-56-layers": 50_018_000_896,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "Qwen/Qwen3-30B-A3B-Base": 30_532_122_624,
    "models/Qwen3-30B-A3B-4-layers": 3_114_814_464,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "openai/gpt-oss-20b": 20_914_757_184,
}


def write_config(hub_name: str, folder: Path) -> Path:
    """Write config.json of a model into a folder; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[hub_name]), encoding="utf-8")
    return folder
