"""Context-parallel attention on GPUs: each of torch's kernels, and each of the layers' settings.

The settings are compared in four processes, which share what cards there are.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import context_parallel_ranks
import pytest
import torch
from all_cards import NUM_CARDS, on_all_cards, on_ranks
from context_parallel_cases import CASES, TRAINED, Setup, measure
from gradients import SHAPE
from hf_models import save_random_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrainkit.megatron.attention_kernels import AttentionBlock, CuDnn, Efficient, Flash, block_kernel
from pretrainkit.models.registry import read_shape

pytestmark = pytest.mark.skipif(not NUM_CARDS, reason="needs a GPU")
KERNELS = [
    (SDPBackend.CUDNN_ATTENTION, CuDnn, torch.bfloat16),
    (SDPBackend.FLASH_ATTENTION, Flash, torch.bfloat16),
    (SDPBackend.EFFICIENT_ATTENTION, Efficient, torch.bfloat16),
    (SDPBackend.EFFICIENT_ATTENTION, Efficient, torch.float32),
]
FAMILIES = (
    "gemma2",
    "gemma3",
    "olmo3",
    "exaone4",
    "ministral3",
    "phi3-longrope",
    "glm4",
    "apertus",
    "deepseek-v2-lite",
)
"""Without experts: a token that rounding sends to another changes the gradients of two."""


@pytest.mark.skipif(NUM_CARDS < 2, reason="needs two GPUs")
def test_output_and_gradients_are_those_of_one_rank() -> None:
    on_all_cards(_compare)


def _compare() -> None:
    for backend, kernel, dtype in KERNELS:
        for head_size in (64, 128):
            for length in (256, 600, 4096):
                with sdpa_kernel([backend, SDPBackend.MATH]):
                    q = torch.empty(1, 4, length, head_size, dtype=dtype, device="cuda")
                    if kernel is not Efficient:  # which serves what is left
                        assert isinstance(block_kernel(AttentionBlock(q, q[:, :2], q[:, :2], True, None)), kernel)
                    group = torch.distributed.group.WORLD
                    context_parallel_ranks.compare_with_one_rank(group, length, head_size, dtype, "cuda")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `measure` found, in groups of two and of four ranks."""
    folder = tmp_path_factory.mktemp("measured")
    # Gradients go through sockets: few ids.
    shapes = {name: replace(SHAPE, features=features, vocab_size=2048) for name, features in TRAINED.items()}
    for name in FAMILIES:
        save_random_model(name, folder / name, seed=0, dtype="float32", max_shard_size="1GB")
        shape = read_shape(folder / name)
        features = replace(shape.features, dense_layers=(), routing=None)
        shapes[name] = replace(shape, num_experts=0, features=features)
    on_ranks(measure, 4, folder / "found.json", Setup("cuda", torch.bfloat16, 2048, 12), shapes)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_settings_of_attention_are_as_near_to_fp32_as_on_one_rank(
    name: str, ranks: int, measured: dict[str, Any]
) -> None:
    for part, (one, several) in measured["attention"][f"{name}, CP={ranks}"].items():
        assert one < 1e-2, part
        # The ranks' gradients of sinks are rounded to bf16 before they are added.
        assert several <= (2.0 if part == "sinks" else 1.25) * one + 5e-4, part


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_of_families_are_as_near_to_fp32_as_on_one_rank(name: str, measured: dict[str, Any]) -> None:
    errors = measured["families"][name]
    assert errors["two ranks"] <= 1.5 * errors["one rank"] + 1e-2, errors


@pytest.mark.parametrize("name", TRAINED)
def test_two_ranks_train_what_one_trains(name: str, measured: dict[str, Any]) -> None:
    one, two = measured["training"][name]
    assert one[-1] < one[0] - 1
    assert two[0] == pytest.approx(one[0], abs=3e-3)
    assert two == pytest.approx(one, rel=0.02)
