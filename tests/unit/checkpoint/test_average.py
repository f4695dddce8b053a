"""Shares of an average, and its independence of how the work is divided."""

from __future__ import annotations

import pytest
import torch

from pretrainkit.checkpoint import lazy_tensor
from pretrainkit.checkpoint.average import ema_weights, normalised, weighted_sum
from pretrainkit.checkpoint.lazy_tensor import LazyTensor


@pytest.mark.parametrize("steps", [[10], [10, 20, 30], [5, 6, 100, 4000]])
def test_shares_of_a_moving_average_are_those_of_its_recurrence(steps: list[int]) -> None:
    average = [1.0] + [0.0] * (len(steps) - 1)
    for i in range(1, len(steps)):
        kept = 0.9 ** ((steps[i] - steps[i - 1]) / 50)
        average = [kept * share for share in average]
        average[i] += 1 - kept
    assert ema_weights(steps, 0.9, 50) == pytest.approx(average, rel=1e-14)
    assert sum(ema_weights(steps, 0.9, 50)) == pytest.approx(1, rel=1e-14)


def test_weights_are_scaled_to_one() -> None:
    assert normalised([1, 3], 2) == [0.25, 0.75]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_slices_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [LazyTensor.of(torch.randn(103, 7, dtype=torch.float64).to(dtype)) for _ in range(5)]
    whole = weighted_sum(parts, [0.1, 0.2, 0.3, 0.15, 0.25])
    monkeypatch.setattr(lazy_tensor, "SLICE_BYTES", 200)
    pieces = weighted_sum(parts, [0.1, 0.2, 0.3, 0.15, 0.25])
    assert len(pieces.blocks) > 10
    assert torch.equal(whole.tensor(), pieces.tensor())
    assert torch.equal(whole.rows(50, 9).tensor(), pieces.rows(50, 9).tensor())
    assert whole.dtype == torch.promote_types(dtype, torch.float32)
