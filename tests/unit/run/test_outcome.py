"""The exit code of an attempt is that of the rank that failed first."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from namespaces import in_namespace

from pretrainkit.run.outcome import Outcome, outcome_of, read_outcome, with_cause, write_outcome


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


def test_the_outcome_has_the_message_of_the_rank_that_failed(tmp_path: Path) -> None:
    assert with_cause(Outcome(1, 1, "rank 1 failed"), tmp_path).reason.startswith("rank 1 failed")
    (tmp_path / "rank_1.err").write_text("train.py: error: a: first\nlotrain.py: error: b: second\n  Needed: c\n")
    assert with_cause(Outcome(1, 1, "rank 1 failed"), tmp_path).reason == "rank 1 failed: b: second"


FILL = """
import os, pathlib, sys
from pretrainkit.run.outcome import Outcome, read_outcome, reserve_outcome, with_cause, write_outcome
log_dir = pathlib.Path(sys.argv[1])
reserve_outcome(log_dir)
with (log_dir / "filler").open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
outcome = with_cause(Outcome(1, 0, "rank 0 failed"), log_dir)
write_outcome(log_dir, outcome)
assert read_outcome(log_dir) == outcome, read_outcome(log_dir)
print(outcome.reason, sorted(path.name for path in log_dir.iterdir()))
"""


def test_a_disk_without_free_space_holds_the_outcome_that_names_it(tmp_path: Path) -> None:
    done = in_namespace(f"mount -t tmpfs -o size=64k none {tmp_path}", [sys.executable, "-c", FILL, tmp_path])
    assert f"rank 0 failed: the disk of {tmp_path} is full (0 B are free) ['filler', 'outcome.json']" in done.stdout, (
        done.stderr
    )
