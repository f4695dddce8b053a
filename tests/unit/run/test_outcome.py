"""The exit code of an attempt is that of the rank that failed first."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrainkit.run.outcome import Outcome, outcome_of, read_outcome, write_outcome


@pytest.mark.parametrize(
    ("exit_codes", "exit_code", "rank"),
    [
        ({0: 85, 1: 85}, 85, 0),
        ({1: 85, 0: -15}, 85, 1),
        ({1: 85, 0: 1}, 85, 1),
        ({3: 1, 0: 85}, 1, 3),
        ({3: 7, 0: 1, 1: -15}, 7, 3),
        ({2: -9, 0: 1}, 1, 2),
        ({2: -15}, 1, 2),
    ],
)
def test_the_first_failure_decides(exit_codes: dict[int, int], exit_code: int, rank: int) -> None:
    outcome = outcome_of(exit_codes)
    assert (outcome.exit_code, outcome.failed_rank) == (exit_code, rank)
    assert outcome.reason


def test_a_killed_rank_is_told_with_its_signal() -> None:
    assert "rank 2 was killed by SIGKILL: out of memory" in outcome_of({2: -9}).reason


def test_an_outcome_comes_back_and_none_is_a_failure(tmp_path: Path) -> None:
    assert read_outcome(tmp_path).exit_code == 1
    write_outcome(tmp_path, Outcome(85, 0, "stopped"))
    assert read_outcome(tmp_path) == Outcome(85, 0, "stopped")
