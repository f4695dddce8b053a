"""The Megatron model computes what the Hugging Face model computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks

pytestmark = pytest.mark.integration

MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True, "num_hidden_layers": 4},
    "no grouping": {"num_key_value_heads": 8},
    "head size of its own": {"head_dim": 16},
    "llama3 rope": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            # Short enough for the tested sequence to reach all three bands of frequencies.
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.mark.parametrize("tensor_parallel_size", [1, 2], ids=["TP=1", "TP=2"])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_megatron_logits_are_those_of_transformers(
    make_hf_llama: Callable[..., Path], tmp_path: Path, config: dict[str, Any], tensor_parallel_size: int
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from pretrainkit.checkpoint.convert import convert

    hf_folder = make_hf_llama(seed=3, **config)
    convert(hf_folder, tmp_path / "nemo")
    model = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    tokens = torch.randint(0, model.config.vocab_size, (2, 200), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, tmp_path / "tokens.pt")
    with torch.no_grad():
        expected = model(tokens).logits
    ranks.run_ranks(
        ranks.logits_rank,
        tensor_parallel_size,
        tmp_path,
        hf_folder=hf_folder,
        checkpoint=tmp_path / "nemo",
        tokens_file=tmp_path / "tokens.pt",
    )
    logits = torch.load(tmp_path / "logits.pt")
    assert expected.abs().max() > 0.1  # random weights that say something
    assert (logits - expected).abs().max() < 1e-4


def test_the_fused_norm_has_the_gradients_of_the_plain_one(tmp_path: Path) -> None:
    """A whole model, since the residual stream takes another way through each of its blocks."""
    ranks.run_ranks(ranks.norm_gradients_rank, 1, tmp_path)
