from __future__ import annotations

import pytest

from pretrainkit.config.schema import ModelShape
from pretrainkit.models.flops import active_parameters, matmul_parameters, parameters, training_flops_per_token
from pretrainkit.models.hf_config import read_fields
from pretrainkit.models.registry import family_named
from pretrainkit.run.gpu_specs import peak_flops

LLAMA_32_1B = ModelShape("llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 500000.0, 1e-5, True)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
    ],
)
def test_peak_is_found_by_whole_words_of_the_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_matmul_parameters_of_llama_3_2_1b() -> None:
    # 1,235,814,400 parameters in all, of which 33 norms of 2,048; the tied embedding counts once, as the head.
    assert matmul_parameters(LLAMA_32_1B) == 1_235_814_400 - 33 * 2048


def test_matmul_parameters_are_those_of_the_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=8,
                    num_key_value_heads=2, tie_word_embeddings=False)
    )  # fmt: skip
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name)
    shape = ModelShape("llama", 3, 64, 128, 8, 2, 8, 320, 512, 1e4, 1e-5, False)
    assert matmul_parameters(shape) == matrices


LATENT = {"attention_bias": False, "first_k_dense_replace": 1, "rope_theta": 10000.0}
KINDS = {
    "deepseek_v2": {  # V2-Lite
        **LATENT, "hidden_size": 2048, "intermediate_size": 10944, "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "q_lora_rank": None, "vocab_size": 102400,
    },
    "deepseek_v3": {},  # the defaults of its class are DeepSeek-V3's
    "gemma4_text": {  # a dense one of 31B
        "attention_k_eq_v": True, "hidden_size": 5376, "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
        "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
    },
    "glm4_moe": {"use_qk_norm": True},  # GLM-4.5-Air's
    "llama4_text": {"interleave_moe_layer_step": 2, "num_local_experts": 128},  # Maverick
    "qwen3_5_moe_text": {},  # Qwen3.5-35B-A3B's
    "qwen3_5_text": {},  # Qwen3.5-9B's
    "qwen3_next": {},  # and those of this one Qwen3-Next-80B-A3B's
}  # fmt: skip
PUBLISHED = {"deepseek_v2": 15_706_484_224, "deepseek_v3": 671_026_419_200, "qwen3_next": 79_674_391_296}


@pytest.mark.parametrize("family", KINDS)
def test_parameters_of_models_with_kinds_of_layers_are_those_of_transformers(family: str) -> None:
    """All, those that a token meets, and those of matrix products, by the names of a model without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    found = family_named(family)
    config = {**found.defaults, "architectures": [*found.architectures], **KINDS[family]}
    shape = found.shape(read_fields(config, found, ""))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **KINDS[family]))
    tensors = model.state_dict()
    if shape.tie_word_embeddings:  # the head's rows are those of the embedding
        del tensors["model.embed_tokens.weight"]
    total = sum(tensor.numel() for tensor in tensors.values())
    experts = sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name)
    idle = experts * (shape.num_experts - shape.experts_per_token) // max(shape.num_experts, 1)
    assert parameters(shape) == total == PUBLISHED.get(family, total)
    assert active_parameters(shape) == total - idle
    left = ("embed_tokens", "shared_expert_gate", "conv1d")
    others = sum(t.numel() for name, t in tensors.items() if t.ndim == 1 or any(part in name for part in left))
    assert matmul_parameters(shape) == total - idle - others


def test_a_token_visits_only_its_experts() -> None:
    import dataclasses

    moe = dataclasses.replace(LLAMA_32_1B, num_experts=8, experts_per_token=2, expert_ffn_hidden_size=4096)
    more = dataclasses.replace(moe, num_experts=16)
    assert matmul_parameters(more) - matmul_parameters(moe) == 16 * 2048 * 8  # the router's rows alone


def test_longer_sequences_cost_attention() -> None:
    short, long = (training_flops_per_token(LLAMA_32_1B, length) for length in (4096, 8192))
    assert long - short == 6 * 16 * 2048 * 4096
    assert short == 6 * matmul_parameters(LLAMA_32_1B) + 6 * 16 * 2048 * 4096
