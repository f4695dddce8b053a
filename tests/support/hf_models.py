"""Tiny random Hugging Face models of every family that can be converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 263,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.2,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
GROWING_ROPE = {
    **YARN_ROPE,
    "attention_factor": None,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 512,
    "llama_4_scaling_beta": 0.1,
}
WINDOW = {"sliding_window": 40}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "aux_loss_alpha": 0.01,
    "seq_aux": True,
    "pad_token_id": 2,
}
DEEPSEEK_ROPE = {**YARN_ROPE, "attention_factor": None, "mscale": 1.5, "mscale_all_dim": 0.7}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "max_position_embeddings": 131072}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "phi3": ("Phi3", {"original_max_position_embeddings": 512, "pad_token_id": 2}),
    "seed-oss": ("SeedOss", {"head_dim": 16}),
}
"""Name -> transformers' class prefix, and what differs from BASE; what Megatron-LM's arguments can express."""
LATENT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-lm": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 48,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "max_position_embeddings": 32768,
            "rope_scaling": {**DEEPSEEK_ROPE, "original_max_position_embeddings": 4096},
        },
    ),
    "deepseek-v3-lm": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": None,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
}
"""Those with latent attention."""
DELTA_NET = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "pad_token_id": 2,
}
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 12.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.22,
    "pad_token_id": 2,
}
FEATURED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("Mistral", {"head_dim": 16, **WINDOW}),
    "qwen3-windows": ("Qwen3", {"head_dim": 16, "use_sliding_window": True, "max_window_layers": 2, **WINDOW}),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_theta": 10000.0, "rope_scaling": YARN_ROPE}),
    "llama-dynamic": ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "phi3-longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.1, 3.0, 8.0]},
            "pad_token_id": 2,
        },
    ),
    "olmo2": ("Olmo2", {"pad_token_id": 2}),
    "olmo3": ("Olmo3", {"pad_token_id": 2, "rope_theta": 500000.0, "rope_scaling": YARN_ROPE, **WINDOW}),
    "smollm3": ("SmolLM3", {"pad_token_id": 2, "tie_word_embeddings": True}),
    "granite": ("Granite", GRANITE),
    "granite-moe": ("GraniteMoe", {**GRANITE, "intermediate_size": 32, "num_local_experts": 8}),
    "granite4": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["attention"] * 4,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "rope_theta": 150000.0,
            "rope_scaling": {**YARN_ROPE, "truncate": False},
            "swiglu_limit": 0.5,
            **WINDOW,
        },
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16, "use_bias": True, "pad_token_id": 2}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 2}),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "pad_token_id": 2,
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "seq_aux": False, "rms_norm_eps": 1e-05}),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": 48,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 16.0,
            "rope_scaling": DEEPSEEK_ROPE,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            "q_lora_rank": 48,
            "n_group": 4,
            "topk_group": 2,
            "rope_scaling": DEEPSEEK_ROPE,
            "rms_norm_eps": 1e-05,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "pad_token_id": 2,
            **WINDOW,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
            "pad_token_id": 2,
            **WINDOW,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 4.0,
            "pad_token_id": 2,
            **WINDOW,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "head_dim": 16,
            "intermediate_size": 32,
            "intermediate_size_mlp": 128,
            "num_local_experts": 8,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 24,
            "floor_scale": 16,
            "pad_token_id": 2,
        },
    ),
    "exaone4": ("Exaone4", {**WINDOW}),
    "qwen3-next": (
        "Qwen3Next",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 64,
            **DELTA_NET,
        },
    ),
    "qwen3_5": ("Qwen3_5", DELTA_NET),
    "qwen3_5-moe": ("Qwen3_5Moe", {**EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 64}),
    "apertus": ("Apertus", {"pad_token_id": 2}),
    "ministral3": ("Ministral3", {"head_dim": 16, "pad_token_id": 2, "rope_parameters": GROWING_ROPE}),
}
"""Those with features of layers, which Megatron-LM's arguments can't express, or another scaling."""
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "depth": 1,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "temporal_patch_size": 1,
    },
    "image_token_id": 7,
}
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 7}),
    "gemma4": (
        "Gemma4",
        {
            "vision_config": {
                **VISION,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 16,
            },
            "audio_config": None,
            "image_token_id": 7,
        },
    ),
    "qwen3_5": ("Qwen3_5", QWEN_VISION),
    "qwen3_5-moe": ("Qwen3_5Moe", QWEN_VISION),
    "llama4": (
        "Llama4",
        {
            "vision_config": {
                **VISION,
                "intermediate_size": 128,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
            "image_token_index": 7,
        },
    ),
    "ministral3": (
        "Mistral3",
        {
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16, "image_size": 56},
            "image_token_index": 7,
        },
    ),
}
"""Model of FEATURED -> class prefix of the multimodal model around it, and the rest of its config."""
_CONFIGS = dict.fromkeys(("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe"), "TextConfig")
_ZERO_CENTERED = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
MIXTURES = ("mixtral", "qwen3-moe", "qwen2-moe")


def save_multimodal_model(name: str, folder: Path, **config: Any) -> None:
    """Write the multimodal model around the model `name` with random weights; `config` changes its text model's."""
    import torch
    import transformers

    torch.manual_seed(0)
    prefix, settings = MULTIMODAL[name]
    text_prefix, text_settings = FEATURED[name]
    text = {**BASE, **text_settings, **config}
    text_config = getattr(transformers, text_prefix + _CONFIGS.get(text_prefix, "Config"))(**text)
    tied = text["tie_word_embeddings"]
    whole = getattr(transformers, f"{prefix}Config")(text_config=text_config, tie_word_embeddings=tied, **settings)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(whole)
    for weight, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, _mean(weight, parameter, text_prefix), 0.1)
    model.save_pretrained(folder, max_shard_size="200KB")
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "any"}')


def _mean(weight: str, parameter: Any, prefix: str) -> float:
    """Of a weight's random values: norms that double their input would make rounding show in the logits."""
    is_norm = weight.endswith("norm.weight") and "linear_attn" not in weight
    return 0.0 if parameter.dim() > 1 or (prefix in _ZERO_CENTERED and is_norm) else 1.0


def save_random_model(name: str, folder: Path, *, seed: int, dtype: str, max_shard_size: str, **config: Any) -> None:
    """Write the model `name` of MODELS with random weights; `config` changes its config.json."""
    import torch
    import transformers

    prefix, settings = (MODELS | LATENT_MODELS | FEATURED)[name]
    torch.manual_seed(seed)
    classes = [getattr(transformers, f"{prefix}{kind}") for kind in ("ForCausalLM", _CONFIGS.get(prefix, "Config"))]
    model = classes[0](classes[1](**{**BASE, **settings, **config}))
    for weight, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, _mean(weight, parameter, prefix), 0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, 0.0, 0.1)
        if name.endswith("layer_scalar"):
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
