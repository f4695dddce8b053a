"""The share that a change saves is found in noise, and noise alone gives none."""

from __future__ import annotations

import numpy as np
import pytest

from pretrainkit.diagnosis.statistics import saved_share, typical_s


def windows(generator: np.random.Generator, rounds: int, step_s: float, disturbed: float) -> list[list[float]]:
    """Steps of a machine on which a neighbour makes a share of the steps up to five times as long."""
    steps = step_s * (1 + 0.02 * generator.standard_normal((rounds, 6)))
    slow = generator.random((rounds, 6)) < disturbed
    return (steps * np.where(slow, 1 + 4 * generator.random((rounds, 6)), 1)).tolist()


@pytest.mark.parametrize("disturbed", [0.0, 0.2, 0.4])
@pytest.mark.parametrize("saved", [0.1, 0.5, -0.5])
def test_a_saving_is_found_among_disturbed_steps(saved: float, disturbed: float) -> None:
    generator = np.random.default_rng(1)
    before, after = (windows(generator, 14, step_s, disturbed) for step_s in (0.1, 0.1 * (1 - saved)))
    found = saved_share(before, after)
    assert found.value == pytest.approx(saved, abs=0.04)
    assert found.low <= found.value <= found.high
    assert (found.low > 0) == (saved > 0)


def test_noise_alone_is_rarely_certain_and_never_large() -> None:
    generator = np.random.default_rng(2)
    certain = 0
    for _ in range(60):
        before, after = (windows(generator, 12, 0.1, 0.3) for _ in range(2))
        found = saved_share(before, after)
        certain += found.low > 0
        assert abs(found.value) < 0.1
    assert certain <= 3


def test_steps_of_different_length_are_compared_each_with_itself() -> None:
    generator = np.random.default_rng(3)
    shape = np.array([1.0, 5.0, 0.2])
    before = (shape * (1 + 0.01 * generator.standard_normal((8, 3)))).tolist()
    after = (0.7 * shape * (1 + 0.01 * generator.standard_normal((8, 3)))).tolist()
    assert saved_share(before, after).value == pytest.approx(0.3, abs=0.02)


def test_rounds_of_different_numbers_of_steps_are_compared_as_a_whole() -> None:
    assert saved_share([[1.0, 1.0], [2.0]], [[1.0], [1.0]]).value == pytest.approx(0.5)


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_of_few_rounds_the_interval_is_that_of_student(rounds: int) -> None:
    generator = np.random.default_rng(4)
    covered = 0
    for _ in range(200):
        before, after = (seconds * (1 + 0.1 * generator.standard_normal((rounds, 1))) for seconds in (1.0, 0.5))
        found = saved_share(before.tolist(), after.tolist())
        covered += found.low <= 0.5 <= found.high <= 1
    assert covered > 180


def test_the_typical_time_is_the_median() -> None:
    assert typical_s([[1.0], [1.1], [9.0]]).value == pytest.approx(1.1)
