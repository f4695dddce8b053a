from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_run

from pretrainkit.config.schema import OptimizerConfig, ResolvedRun
from pretrainkit.run.lr_schedule import learning_rate

SCHEDULES = ("cosine", "linear", "constant")
WITH_DECAY = ("wsd", "power")


def scheduled(
    schedule: str,
    *,
    max_lr: float = 1e-3,
    warmup_steps: int = 10,
    decay_steps: int = 110,
    cooldown_steps: int = 0,
    **optimizer: Any,
) -> ResolvedRun:
    run = tiny_run(Path("/runs"))
    config = dataclasses.replace(run.config, optimizer=OptimizerConfig(lr=max_lr, lr_schedule=schedule, **optimizer))
    steps = {"lr_warmup_steps": warmup_steps, "lr_decay_steps": decay_steps, "lr_cooldown_steps": cooldown_steps}
    return dataclasses.replace(run, config=config, min_lr=1e-4, **steps)


def rate(schedule: str, step: int, **settings: Any) -> float:
    return learning_rate(scheduled(schedule, **settings), step)


@pytest.mark.parametrize("schedule", SCHEDULES + WITH_DECAY)
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


@pytest.mark.parametrize(("style", "left"), [("linear", 0.75), ("cosine", 0.5 + 0.25 * 2**0.5), ("1-sqrt", 0.5)])
def test_wsd_is_stable_and_then_decays_in_its_style(style: str, left: float) -> None:
    run = scheduled("wsd", cooldown_steps=20, lr_cooldown_style=style)
    assert {learning_rate(run, step) for step in range(10, 91)} == {1e-3}
    assert learning_rate(run, 95) == pytest.approx(1e-4 + 9e-4 * left)
    assert [learning_rate(run, step) for step in (110, 111, 10**6)] == [1e-4] * 3


def test_a_longer_wsd_run_has_the_same_rates_up_to_the_decay() -> None:
    run, longer = (scheduled("wsd", decay_steps=steps, cooldown_steps=20) for steps in (110, 1010))
    assert [learning_rate(run, step) for step in range(91)] == [learning_rate(longer, step) for step in range(91)]


def test_power_follows_the_law_from_the_end_of_the_warmup_and_not_below_min_lr() -> None:
    run = scheduled("power", decay_steps=10**6, cooldown_steps=10, lr_power_b=-0.5)
    assert [learning_rate(run, 11 * 4**n - 1) for n in range(3)] == pytest.approx([1e-3, 5e-4, 2.5e-4])
    assert learning_rate(run, 10**5) == 1e-4


def test_power_with_the_papers_a_depends_on_batch_and_tokens_alone() -> None:
    run = scheduled("power", max_lr=1.0, warmup_steps=0, decay_steps=10**9, lr_power_a=4.6)
    tokens = 10**6 * 4 * 128  # 4 samples of 128 a step
    assert learning_rate(run, 10**6 - 1) == pytest.approx(4 * 4.6 * tokens**-0.51)
    assert learning_rate(scheduled("power", lr_power_a=1e9), 50) == 1e-3, "never above --lr"


def test_the_decay_of_power_begins_at_the_rate_of_the_law() -> None:
    settings = {"lr_power_b": -0.5, "lr_cooldown_style": "linear"}
    with_decay, without = (scheduled("power", cooldown_steps=steps, **settings) for steps in (20, 0))
    assert learning_rate(with_decay, 90) == learning_rate(without, 90)
    assert learning_rate(with_decay, 100) == pytest.approx((learning_rate(without, 90) + 1e-4) / 2)


@pytest.mark.parametrize("schedule", SCHEDULES + WITH_DECAY)
def test_rewarming_is_the_schedule_once_more_with_a_warmup_from_the_lowest_rate(schedule: str) -> None:
    first, again = scheduled(schedule), scheduled(schedule, lr_rewarm_step=1000, decay_steps=1110)
    assert learning_rate(again, 1000) == pytest.approx(1e-4 + 9e-4 / 11)
    assert learning_rate(again, 1009) == pytest.approx(1e-4 + 9e-4 * 10 / 11)
    after = range(10, 111)
    assert [learning_rate(again, 1000 + step) for step in after] == [learning_rate(first, step) for step in after]
    assert learning_rate(again, 999) == 1e-4
