from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.callbacks.loss_guard import MIN_STEPS, WINDOW_STEPS, LossGuard, problem_of


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_bad_from_the_first_step(loss: float) -> None:
    assert str(loss) in problem_of(loss, [], None)


def test_without_a_bound_any_finite_loss_is_fine() -> None:
    assert problem_of(1e9, WINDOW_STEPS * [2.0], None) == ""


def test_a_spike_is_detected_once_enough_steps_are_known() -> None:
    for steps in range(MIN_STEPS):
        assert problem_of(100.0, steps * [2.0], 1.5) == ""
    before = MIN_STEPS * [2.0]
    assert problem_of(3.0, before, 1.5) == ""
    assert problem_of(3.01, before, 1.5) == f"the loss 3.0100 is over 1.5 x 2.0000, the mean of {MIN_STEPS} steps"


def test_only_the_last_steps_count(make_run: Callable[..., ResolvedRun]) -> None:
    losses = LossGuard(make_run(), None)._losses
    losses.extend([*[10.0] * WINDOW_STEPS, *[2.0] * WINDOW_STEPS])
    assert problem_of(4.0, losses, 1.5)
