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
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
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
}
"""Name -> transformers' class prefix, and what differs from BASE."""
MIXTURES = ("mixtral", "qwen3-moe", "qwen2-moe")


def save_random_model(name: str, folder: Path, *, seed: int, dtype: str, max_shard_size: str, **config: Any) -> None:
    """Write the model `name` of MODELS with random weights; `config` changes its config.json."""
    import torch
    import transformers

    prefix, settings = MODELS[name]
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(
        getattr(transformers, f"{prefix}Config")(**{**BASE, **settings, **config})
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
