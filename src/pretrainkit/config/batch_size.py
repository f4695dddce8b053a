"""The global batch size by samples used: constant, or warmed up as by Megatron-LM's --rampup-batch-size."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretrainkit.config.training import TrainingConfig


def parse_rampup(text: str) -> tuple[int, int, int]:
    """START, INCREMENT and SAMPLES of a value of --rampup_batch_size. Raises ValueError for others."""
    numbers = tuple(int(word) for word in text.replace(",", " ").split())
    if len(numbers) != 3 or min(numbers) < 1:
        raise ValueError(f"{text!r}")
    return numbers[0], numbers[1], numbers[2]


def batch_size_at(training: TrainingConfig, consumed_samples: int) -> int:
    """Samples of the step that begins after so many were used.

    With a warm-up it grows by INCREMENT from START to the global batch size, in equal shares of SAMPLES, as Megatron's
    RampupBatchsizeNumMicroBatchesCalculator has it (megatron-core 0.16).
    """
    if not training.rampup_batch_size:
        return training.global_batch_size
    start, increment, samples = parse_rampup(training.rampup_batch_size)
    growths = (training.global_batch_size - start) // increment
    return start + increment * min(growths, consumed_samples * growths // samples)


def samples_after(training: TrainingConfig, steps: int, consumed_samples: int = 0) -> int:
    """Samples used when `steps` steps more are done after so many were used."""
    while steps and (size := batch_size_at(training, consumed_samples)) < training.global_batch_size:
        start, increment, samples = parse_rampup(training.rampup_batch_size or "")
        growths = (training.global_batch_size - start) // increment
        grows_at = -(-((size - start) // increment + 1) * samples // growths)
        done = min(steps, -(-(grows_at - consumed_samples) // size))
        consumed_samples, steps = consumed_samples + done * size, steps - done
    return consumed_samples + steps * training.global_batch_size


def steps_within(training: TrainingConfig, samples: int) -> int:
    """The most steps that a run can do with so many samples, from its first."""
    smallest = batch_size_at(training, 0)
    steps = range(samples // smallest + 1)
    return bisect.bisect_right(steps, samples, key=lambda step: samples_after(training, step)) - 1
