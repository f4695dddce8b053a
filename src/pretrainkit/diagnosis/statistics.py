"""What windows that were measured in turn say: how much time a change saves, and how sure that is.

A neighbour on the machine only ever adds time, and adds it to some steps much and to others nothing. So speed is
read off the undisturbed steps: the lower quartile over the rounds, of each step of a window by itself. Rounds
alternate between the two settings, so that both have seen the same quiet and busy times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_ENDS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
RESAMPLES = 1000
UNDISTURBED = 0.25
"""Quantile over the rounds that is taken for a step without disturbance."""

MANY = 6
"""Rounds from which on their own spread can be resampled."""
STUDENT_T = {1: 1.0, 2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Of the mean of so many rounds, at 95%."""
REPEATABLE = 0.01
"""Windows of one setting differ by this at least, however close a few of them are: measured on quiet machines."""

Rounds = Sequence[Sequence[float]]
"""For each round, the seconds of each step of its window; the same steps in every round."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """The interval of `factor` (above 0) times the quantity."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)

    def within_bounds(self) -> Interval:
        """The interval without what can't be: less than nothing, more than all."""
        value, low, high = (min(max(share, 0.0), 1.0) for share in (self.value, self.low, self.high))
        return Interval(value, low, high)

    def widened(self, half: float) -> Interval:
        """The interval with another source of error, independent of what it has."""
        low, high = ((end**2 + half**2) ** 0.5 for end in (self.value - self.low, self.high - self.value))
        return Interval(self.value, self.value - low, self.value + high)


def saved_share(before_s: Rounds, after_s: Rounds) -> Interval:
    """Share of the time that a change saves: 1 - after / before; negative when it costs time.

    Round i of both was measured one after the other. Of many rounds the interval is found by resampling them, and
    widened for how few they are; of two to five by Student's t over whole windows. Of one it is wide open.
    """
    assert len(before_s) == len(after_s) and before_s
    before, after = _matrix(before_s), _matrix(after_s)
    count = len(before)
    if count < MANY:
        ratios = np.log(after.sum(axis=1) / before.sum(axis=1))
        centre = float(ratios.mean())
        spread = max(float(ratios.std(ddof=1)), REPEATABLE) if count > 1 else 3.0
        half = STUDENT_T[count] * spread / count**0.5
        return _share(centre, centre - half, centre + half)
    drawn = np.random.default_rng(count).integers(0, count, (RESAMPLES, count))
    logs = np.log(_undisturbed(after[drawn]) / _undisturbed(before[drawn]))
    centre = float(np.log(_undisturbed(after) / _undisturbed(before)))
    low, high = np.quantile(logs, _ENDS)
    widening = 1 + 4 / count
    return _share(centre, min(0, low - centre) * widening + centre, max(0, high - centre) * widening + centre)


def _share(centre: float, low: float, high: float) -> Interval:
    """Of logarithms of after / before."""
    return Interval(1 - float(np.exp(centre)), 1 - float(np.exp(high)), 1 - float(np.exp(low)))


def whole(windows_s: Iterable[Sequence[float]]) -> list[list[float]]:
    """Windows as one step each."""
    return [[sum(window)] for window in windows_s]


def typical_s(windows_s: Rounds) -> Interval:
    """Seconds of a whole window: the median over the rounds, with an interval by resampling."""
    totals = np.asarray([sum(window) for window in windows_s], float)
    drawn = np.random.default_rng(len(totals)).integers(0, len(totals), (RESAMPLES, len(totals)))
    medians = np.median(totals[drawn], axis=1)
    low, high = np.quantile(medians, _ENDS)
    return Interval(float(np.median(totals)), float(low), float(high))


def undisturbed_s(windows_s: Rounds) -> float:
    """Seconds of a whole window without disturbance."""
    return float(_undisturbed(_matrix(windows_s)))


def _matrix(rounds: Rounds) -> NDArray[np.float64]:
    """[rounds, steps] seconds; whole windows where the rounds have different numbers of steps."""
    if len({len(window) for window in rounds}) > 1:
        rounds = whole(rounds)
    return np.asarray(rounds, np.float64)


def _undisturbed(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., rounds, steps] -> [...]"""
    return np.asarray(np.quantile(seconds, UNDISTURBED, axis=-2).sum(axis=-1))
