"""Attention over a sequence that lies on several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import context_parallel_cases
import context_parallel_ranks
import pytest
import ranks
from context_parallel_cases import CASES

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_output_and_gradients_are_those_of_one_rank(tmp_path: Path, world_size: int) -> None:
    ranks.run_ranks(context_parallel_ranks.compare_on_cpu, world_size, tmp_path)


def test_each_setting_of_attention_is_computed_across_ranks(tmp_path: Path) -> None:
    """In groups of two and of four ranks, in fp32."""
    ranks.run_ranks(context_parallel_cases.measure_on_cpu, 4, tmp_path, output=tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())["attention"]
    assert len(found) == 2 * len(CASES)
    for name, errors in found.items():
        for part, (one, several) in errors.items():
            assert max(one, several) < 5e-6, f"{name}: {part}"
