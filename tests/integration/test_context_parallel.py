"""Attention over a sequence that lies on several ranks."""

from __future__ import annotations

from pathlib import Path

import context_parallel_ranks
import pytest
import ranks

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_output_and_gradients_are_those_of_one_rank(tmp_path: Path, world_size: int) -> None:
    ranks.run_ranks(context_parallel_ranks.compare_on_cpu, world_size, tmp_path)
