from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from tiny_runs import tiny_run

from pretrainkit.config.schema import OptimizerConfig
from pretrainkit.run.lr_schedule import learning_rate

SCHEDULES = ("cosine", "linear", "constant")


def rate(schedule: str, step: int, *, max_lr: float = 1e-3, warmup_steps: int = 10) -> float:
    run = tiny_run(Path("/runs"))
    config = dataclasses.replace(run.config, optimizer=OptimizerConfig(lr=max_lr, lr_schedule=schedule))
    steps = {"lr_warmup_steps": warmup_steps, "lr_decay_steps": 110}
    return learning_rate(dataclasses.replace(run, config=config, min_lr=1e-4, **steps), step)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warms_up_linearly_to_the_highest_rate(schedule: str) -> None:
    rates = [rate(schedule, step) for step in range(11)]
    differences = [later - earlier for earlier, later in itertools.pairwise(rates)]
    assert rates[0] > 0
    assert rates[10] == 1e-3
    assert differences == pytest.approx([differences[0]] * 10)


@pytest.mark.parametrize(
    ("schedule", "half_way"), [("cosine", 5.5e-4), ("linear", 5.5e-4), ("constant", 1e-3)], ids=SCHEDULES
)
def test_passes_the_middle_of_the_decay(schedule: str, half_way: float) -> None:
    assert rate(schedule, 60) == pytest.approx(half_way)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_reaches_the_lowest_rate_and_stays(schedule: str) -> None:
    assert [rate(schedule, step) for step in (110, 111, 10**6)] == [1e-4] * 3


def test_cosine_is_slow_at_both_ends() -> None:
    quarter, three_quarters = (rate("cosine", step) for step in (35, 85))
    assert quarter == pytest.approx(1e-4 + 9e-4 * (0.5 + 0.25 * 2**0.5))
    assert three_quarters == pytest.approx(1e-4 + 9e-4 * (0.5 - 0.25 * 2**0.5))


def test_without_warmup_the_first_step_has_the_highest_rate() -> None:
    assert rate("cosine", 0, max_lr=1.0, warmup_steps=0) == 1.0
