"""Shipped baselines are readable and agree with themselves; a run finds the one it can be compared with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pretrainkit.config.schema import DataConfig, ModelShape, RunConfig, TrainingConfig
from pretrainkit.diagnosis import compare
from pretrainkit.models.flops import training_flops_per_token
from pretrainkit.run.gpu_specs import peak_flops

FOLDER = Path(__file__).parents[3] / "configs" / "baselines"


def shape_of(model: dict[str, int]) -> ModelShape:
    """A shape with the fields that a baseline names."""
    return ModelShape(
        family="llama",
        head_dim=model["hidden_size"] // model["num_attention_heads"],
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **model,
    )


def run_like(item: dict[str, Any], micro_batch_size: int) -> Any:
    """The parts of a resolved run that are compared."""
    return SimpleNamespace(
        model=shape_of(item["model"]),
        world_size=item["ranks"],
        precision=item["precision"],
        config=RunConfig(
            data=DataConfig(sequence_length=item["sequence_length"]),
            training=TrainingConfig(micro_batch_size=micro_batch_size),
        ),
    )


def test_mfu_of_every_baseline_follows_from_its_tokens() -> None:
    baselines = compare.read_baselines(FOLDER)
    assert baselines
    for item in baselines:
        flops = training_flops_per_token(shape_of(item["model"]), item["sequence_length"])
        peak = peak_flops(item["device"])
        assert peak
        assert item["mfu"] == pytest.approx(flops * item["tokens_per_second"] / peak / item["ranks"], abs=0.002)


def test_a_run_is_compared_with_the_nearest_micro_batch_on_its_card() -> None:
    item = compare.read_baselines(FOLDER)[0]
    speed = {"device": item["device"], "effective_tokens_per_second": {"value": 20000.0}}
    for micro_batch_size in (1, 4):
        run = run_like(item, micro_batch_size)
        found = compare.against_baseline(run, speed, FOLDER)
        assert found
        assert found["micro_batch_size"] == micro_batch_size
        assert found["ratio"] == pytest.approx(20000 / found["tokens_per_second"])
    assert compare.against_baseline(run, {**speed, "device": "cpu"}, FOLDER) is None
    other = SimpleNamespace(**{**vars(run), "model": dataclasses.replace(run.model, num_layers=99)})
    assert compare.against_baseline(other, speed, FOLDER) is None  # type: ignore[arg-type]
