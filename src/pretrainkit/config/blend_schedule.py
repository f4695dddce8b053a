"""Weights of a blend that change at steps of the run: --blend_schedule, and the samples at which they change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from pretrainkit.config.batch_size import samples_after

if TYPE_CHECKING:
    from pretrainkit.config.schema import DatasetFacts
    from pretrainkit.config.training import TrainingConfig


class BlendSegment(NamedTuple):
    """Samples that are drawn with the same weights."""

    step: int
    """Steps done before its first."""
    first_sample: int
    weights: tuple[float, ...]
    """One per prefix, on any scale; 0: nothing is drawn from it."""


def parse_blend_schedule(text: str) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """(step, weights) of each change in a value of --blend_schedule. Raises ValueError for others."""
    changes = []
    for word in text.split():
        step, _, weights = word.partition(":")
        changes.append((int(step), tuple(float(weight) for weight in weights.split(","))))
    steps = [step for step, _ in changes]
    if not steps or steps[0] < 0 or steps != sorted(set(steps)):
        raise ValueError(f"{text!r}")
    for _, numbers in changes:
        if not all(math.isfinite(weight) and weight >= 0 for weight in numbers) or not any(numbers):
            raise ValueError(f"{text!r}")
    return tuple(changes)


def blend_segments(training: TrainingConfig, dataset: DatasetFacts) -> list[BlendSegment]:
    """The segments of a run, from its first sample on; one where the weights never change."""
    weights = {0: dataset.weights} | {change.step: change.weights for change in dataset.schedule}
    return [BlendSegment(step, samples_after(training, step), each) for step, each in sorted(weights.items())]
