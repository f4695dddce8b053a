"""The layouts of eight GPUs (configs/baselines) on eight ranks: losses and gradient norms are those of one rank.

On a CPU a layout takes about ten seconds, so one is trained unless EIGHT_RANKS=1 asks for all.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_models import save_random_model

from pretrainkit.checkpoint.convert import convert

pytestmark = pytest.mark.integration
Train = Callable[..., list[dict[str, Any]]]
DENSE: dict[str, dict[str, Any]] = {
    "TP=2, PP=2, DP=2": {"tensor": 2, "sequence_parallel": True, "pipeline": 2, "data_parallel": 2},
    "DP=8": {"data_parallel": 8},
    "TP=8": {"tensor": 8, "sequence_parallel": True},
    "TP=4, PP=2": {"tensor": 4, "sequence_parallel": True, "pipeline": 2},
    "CP=8": {"context": 8},
}
LAYOUTS = [("llama", name, layout) for name, layout in DENSE.items()]
LAYOUTS += [(model, "EP=8", {"data_parallel": 8, "expert": 8}) for model in ("qwen3-moe", "gpt-oss")]


@pytest.fixture(scope="module")
def train(
    train_tiny_in: Callable[..., Any], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[dict[str, Any]]]:
    """Train a random model of a family from its converted weights; each run is made once."""

    @functools.cache
    def converted(model: str) -> tuple[Path, Path]:
        home = tmp_path_factory.mktemp(model)
        sizes = {"vocab_size": 320, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
        save_random_model(model, home / "hf", seed=0, dtype="float32", max_shard_size="1GB", **sizes)
        for path in tokenizer_folder.iterdir():
            shutil.copy(path, home / "hf")
        convert(home / "hf", home / "nemo")
        return home / "hf", home / "nemo"

    @functools.cache
    def trained(model: str, settings: tuple[tuple[str, Any], ...]) -> list[dict[str, Any]]:
        hf, start = converted(model)
        home = tmp_path_factory.mktemp("runs")
        return list(
            train_tiny_in(home, hf, "run", initial_checkpoint=start, global_batch_size=8, max_steps=3, **dict(settings))
        )

    return lambda model, **settings: trained(model, tuple(settings.items()))


@pytest.mark.parametrize(("model", "name", "layout"), LAYOUTS, ids=[f"{model} {name}" for model, name, _ in LAYOUTS])
def test_losses_and_gradient_norms_are_those_of_one_rank(
    model: str, name: str, layout: dict[str, Any], train: Train
) -> None:
    if name != next(iter(DENSE)) and not os.environ.get("EIGHT_RANKS"):
        pytest.skip("EIGHT_RANKS=1 trains all layouts of eight ranks")
    steps, expected = ([each for each in run if "loss" in each] for run in (train(model, **layout), train(model)))
    assert len({each["loss"] for each in expected}) == 3
    losses, norms = ([each[field] for each in steps] for field in ("loss", "grad_norm"))
    assert losses == pytest.approx([each["loss"] for each in expected], abs=2e-6)
    assert norms == pytest.approx([each["grad_norm"] for each in expected], rel=1e-4)
