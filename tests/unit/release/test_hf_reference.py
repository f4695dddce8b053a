"""The streamed Hugging Face model has the losses of the whole one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.errors import CheckpointError
from pretrainkit.models.registry import read_shape
from pretrainkit.release.hf_reference import Request, needed_bytes, token_losses

GIVEN = Path(__file__).parents[2] / "data" / "generation5"
FEATURED = ("qwen3-next", "gemma4", "llama4", "granite-moe")
MODELS = ("llama-tied", "llama3-rope", "mistral", "qwen2", "qwen2-tied", "qwen3", "mixtral", "qwen3-moe", "qwen2-moe")


@pytest.mark.parametrize(
    ("name", "precision"),
    [("llama", "bf16"), ("deepseek-v3", "bf16"), *((name, "fp32") for name in (*MODELS, *FEATURED))],
    ids=lambda word: word,
)
def test_losses_are_those_of_the_whole_model(make_model: Callable[..., Path], name: str, precision: str) -> None:
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    folder = make_model(name, max_shard_size="300KB")  # biases of experts, which are buffers, stay in fp32
    tokens = torch.randint(0, 263, (65,), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters() if precision == "bf16" else ():
            parameter.copy_(parameter.bfloat16())
        logits = model(tokens[None, :-1]).logits[0]
    for padding_rows in (0, 121):
        losses = token_losses(Request(str(folder), tokens.tolist(), precision, padding_rows))
        expected = F.cross_entropy(F.pad(logits, (0, padding_rows)), tokens[1:], reduction="none")
        assert (torch.tensor(losses) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("folder", sorted(GIVEN.iterdir()), ids=lambda folder: folder.name)
def test_a_folder_of_transformers_5_has_the_losses_that_it_should(folder: Path) -> None:
    import torch

    expected = json.loads((folder / "expected.json").read_text())
    last = torch.tensor(expected["logits_last"])
    losses = token_losses(Request(str(folder), [*expected["input_ids"], int(last.argmax())], "fp32", 0))
    assert abs(losses[-1] - float(torch.logsumexp(last, -1) - last.max())) < 1e-5


def test_the_memory_it_needs_is_that_of_a_block_and_not_of_the_model(make_model: Callable[..., Path]) -> None:
    few, many = read_shape(make_model("llama")), read_shape(make_model("llama", num_hidden_layers=8))
    assert needed_bytes(few, 128) == needed_bytes(many, 128)


def test_a_missing_tensor_is_told(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(make_model("llama", max_shard_size="200KB"), folder)
    min(folder.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"missing \['model\."):
        token_losses(Request(str(folder), [1, 2, 3], "fp32", 0))
