"""What a rank keeps for the backward pass, as torch counts it, is what the estimates of long sequences count."""

from __future__ import annotations

import json
from pathlib import Path

import context_parallel_ranks
import pytest
import ranks

pytestmark = pytest.mark.integration


def test_a_rank_keeps_the_keys_of_all_and_one_input_of_a_recomputed_layer(tmp_path: Path) -> None:
    """8 heads and 2 groups of 16: queries, output and their log-sum-exp, and the keys and values of both ranks."""
    ranks.run_ranks(context_parallel_ranks.count_kept, 2, tmp_path, output=tmp_path / "kept.json")
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept["attention"] == 8 * 16 + 8 * 16 + 8 + 2 * (2 * 2 * 16)
    assert kept["recomputed layer"] == 64
