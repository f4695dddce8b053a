from __future__ import annotations

import math

import pytest

from pretrainkit.engine.callbacks.loss_guard import MIN_STEPS, WINDOW_STEPS, LossJudge


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_bad_from_the_first_step(loss: float) -> None:
    assert str(loss) in LossJudge(None).problem(loss)


def test_without_a_bound_any_finite_loss_is_fine() -> None:
    judge = LossJudge(None)
    for _ in range(WINDOW_STEPS):
        judge.accept(2.0)
    assert judge.problem(1e9) == ""


def test_a_spike_is_detected_once_enough_steps_are_known() -> None:
    judge = LossJudge(1.5)
    for _ in range(MIN_STEPS):
        assert judge.problem(100.0) == ""
        judge.accept(2.0)
    assert judge.problem(3.0) == ""
    assert judge.problem(3.01) == f"the loss 3.0100 is over 1.5 x 2.0000, the mean of {MIN_STEPS} steps"


def test_only_the_last_steps_count() -> None:
    judge = LossJudge(1.5)
    for loss in [*[10.0] * WINDOW_STEPS, *[2.0] * WINDOW_STEPS]:
        judge.accept(loss)
    assert judge.problem(4.0)
