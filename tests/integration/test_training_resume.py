"""A run that stops and goes on is the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration


def by_step(records: list[dict[str, Any]]) -> dict[int, tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of each step; of a step done twice, the later one."""
    return {r["step"]: (r["loss"], r["grad_norm"], r["learning_rate"]) for r in records if "loss" in r}


@pytest.fixture(scope="module")
def tiny(make_hf_llama: Callable[..., Path]) -> Path:
    return make_hf_llama()


def test_resumed_losses_equal_unbroken_ones(tiny: Path, train_tiny: Callable[..., Any]) -> None:
    unbroken = train_tiny(tiny, "unbroken", max_steps=8)
    train_tiny(tiny, "stopped", max_steps=4)
    resumed = train_tiny(tiny, "stopped", max_steps=8)
    assert by_step(resumed) == by_step(unbroken)
    assert sorted(by_step(unbroken)) == list(range(1, 9))


@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}, {"data_parallel": 2}, {"context": 2}],
    ids=lambda layout: " ".join(layout),
)
def test_optimizer_state_moves_to_another_layout(
    tiny: Path, train_tiny: Callable[..., Any], layout: dict[str, Any]
) -> None:
    unbroken = train_tiny(tiny, "unbroken", max_steps=8)
    train_tiny(tiny, "stopped", max_steps=4)
    resumed = by_step(train_tiny(tiny, "stopped", max_steps=8, **layout))
    for step, expected in by_step(unbroken).items():
        assert resumed[step] == pytest.approx(expected, abs=1e-6)
        # Splitting weights or layers over ranks changes no order of additions in the forward pass.
        assert "tensor" not in layout or resumed[step][0] == expected[0]
