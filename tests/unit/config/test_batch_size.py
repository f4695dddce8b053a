"""Batch size warm-up counts samples as Megatron does."""

from __future__ import annotations

import pytest

from pretrainkit.config.batch_size import batch_size_at, samples_after, steps_within
from pretrainkit.config.training import TrainingConfig


@pytest.mark.parametrize("rampup", [(2, 2, 20), (4, 4, 7), (4, 2, 1000), (8, 1, 1)], ids=str)
def test_each_step_has_the_size_that_megatron_gives_it(rampup: tuple[int, int, int]) -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    training = TrainingConfig(global_batch_size=12, rampup_batch_size=" ".join(map(str, rampup)))
    megatron = RampupBatchsizeNumMicroBatchesCalculator(12, 1, 1, False, 1, *rampup)
    consumed = 0
    for step in range(300):
        megatron.update(consumed, consistency_check=True)
        size = megatron.get_current_global_batch_size()
        assert batch_size_at(training, consumed) == size
        assert samples_after(training, step) == consumed
        assert samples_after(training, 300 - step, consumed) == samples_after(training, 300)
        assert steps_within(training, consumed) == step == steps_within(training, consumed + size - 1)
        consumed += size


def test_without_a_warmup_every_step_has_the_full_size() -> None:
    training = TrainingConfig(global_batch_size=12)
    assert (batch_size_at(training, 5), samples_after(training, 3, 5), steps_within(training, 35)) == (12, 41, 2)
