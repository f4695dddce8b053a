"""Held-out losses over several attempts of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration


def test_a_run_in_pieces_is_evaluated_where_an_unbroken_one_is_and_at_each_end(
    make_hf_llama: Callable[..., Path], train_tiny: Callable[..., Any]
) -> None:
    def held_out(experiment: str, max_steps: int) -> dict[int, float]:
        settings = {"val_interval": 3, "val_steps": 1, "save_interval": 2, "max_steps": max_steps}
        records = train_tiny(model, experiment, **settings)
        return {record["step"]: record["val_loss"] for record in records if "val_loss" in record}

    model = make_hf_llama()
    unbroken = held_out("unbroken", 7)
    assert list(unbroken) == [0, 3, 6, 7]
    assert list(held_out("pieces", 2)) == [0, 2]
    assert list(held_out("pieces", 6)) == [0, 2, 3, 6]
    pieces = held_out("pieces", 7)
    assert list(pieces) == [0, 2, 3, 6, 7]
    assert {step: pieces[step] for step in unbroken} == unbroken
