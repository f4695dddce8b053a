"""The verdict on two models' losses, and how the comparison is cut."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from pretrainkit.config.schema import ParallelConfig, ResolvedRun
from pretrainkit.engine.callbacks.initial_loss_check import (
    BOUNDS,
    InitialLossCheck,
    Reference,
    judge,
    sequence_length,
)

REFERENCE = Reference([5, 6, 7], [2.0, 4.0])


def test_equal_losses_of_all_ranks_pass() -> None:
    verdict = judge([[0, 0, 0, 0], [1, 2.0, 0, 0], [1, 4.0, 0, 0]], REFERENCE, BOUNDS["fp32"])
    assert verdict.passed
    assert (verdict.hf_loss, verdict.megatron_loss, verdict.num_tokens) == (3.0, 3.0, 2)


@pytest.mark.parametrize(
    "deviations",
    [
        [[2, 6.0, 0, 0], [2, 6.0, 2e-4, 1e-2]],  # one data parallel rank has other weights
        [[2, 6.0, 1e-8, 1.1e-3]],  # one token
        [[2, 6.0, math.nan, 0.0]],
        [[2, 6.0, 0.0, math.nan]],
        [[1, 2.0, 0, 0]],  # a part of the sequence was not seen
        [[0, 0, 0, 0]],
        [],
    ],
)
def test_any_doubt_is_refused(deviations: list[list[float]]) -> None:
    assert not judge(deviations, REFERENCE, BOUNDS["fp32"]).passed


@pytest.mark.parametrize(
    ("parallel", "length", "compared"),
    [
        (ParallelConfig(), 128, 128),
        (ParallelConfig(), 8192, 1024),
        (ParallelConfig(tensor_model_parallel_size=3), 3072, 1020),
        (ParallelConfig(2, 1, 4), 8192, 1024),
    ],
)
def test_the_sequence_can_be_cut_as_the_run_cuts_it(
    make_run: Callable[..., ResolvedRun], parallel: ParallelConfig, length: int, compared: int
) -> None:
    run = make_run()
    data = dataclasses.replace(run.config.data, sequence_length=length)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, parallel=parallel, data=data))
    assert sequence_length(run) == compared


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_without_the_hugging_face_weights_a_run_starts(make_run: Callable[..., ResolvedRun], mode: str) -> None:
    reference = InitialLossCheck(make_run(start_parity=mode), None, rank=0).reference()
    assert reference.skipped and not reference.failed
