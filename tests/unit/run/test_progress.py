"""Which rank the others wait for, which one is slow, and what is said of an attempt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pretrainkit.run import progress
from pretrainkit.run.progress import RankProgress, SlowRank, encode_record, read_attempt, read_rank, write_node

WAITS = RankProgress(0, 10, progress.TRAINING, step=7, ticks=20, tick_s=31.0, is_waiting=True)
WORKS = replace(WAITS, is_waiting=False)


def of(*ranks: RankProgress) -> list[RankProgress]:
    return [replace(rank, rank=number) for number, rank in enumerate(ranks)]


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        (of(WAITS, WORKS, WAITS, WAITS), [1]),
        (of(WAITS, replace(WAITS, silent_s=31.0)), [1]),
        (of(replace(WAITS, silent_s=31.0), replace(WAITS, silent_s=31.0, state="is stopped")), [1]),
        (of(WORKS, WORKS, replace(WORKS, ticks=19)), [2]),
        # The first stage of a pipeline runs ahead, and waits for the last.
        (of(replace(WAITS, ticks=23), replace(WAITS, ticks=23), replace(WORKS, ticks=21), WAITS), [2]),
        (of(WAITS, replace(WORKS, ticks=0, pid=0, phase=progress.STARTING)), [1]),
        (of(WAITS, WAITS), []),
        (of(WORKS), [0]),
    ],
    ids=["works", "silent", "stopped", "behind", "pipeline", "not begun", "nobody", "alone"],
)
def test_the_rank_is_named_that_the_others_wait_for(ranks: list[RankProgress], named: list[int]) -> None:
    assert [rank.rank for rank in progress.waited_for(ranks)] == named


def test_a_slow_rank_is_named_with_what_it_costs() -> None:
    busy = of(*(replace(WAITS, busy=share, data=0.0) for share in (0.45, 0.95, 0.45, 0.44)))
    assert progress.slow_rank(busy) == SlowRank(1, pytest.approx(0.95 / 0.45), pytest.approx(0.5), 0.0)
    assert str(progress.slow_rank(busy)) == (
        "rank 1 takes 2.1 times as long as the median of its peers: it costs 50% of the speed"
    )
    reads = [replace(rank, data=0.8 * (rank.rank == 1)) for rank in busy]
    assert "84% of it waiting for data" in str(progress.slow_rank(reads))
    assert progress.slow_rank(of(*(replace(WAITS, busy=share) for share in (0.6, 0.8)))) is None
    # A stage of a pipeline with more work than the others is not a slow rank.
    assert progress.slow_rank([replace(rank, stage=rank.rank) for rank in busy]) is None


def test_starts_and_saves_are_slow_on_purpose() -> None:
    assert progress.warning_after_s(progress.TRAINING, 0.1) == 30.0
    assert progress.warning_after_s(progress.TRAINING, 60.0) == 300.0
    assert progress.warning_after_s(progress.FIRST_STEP, None) == float("inf")
    assert progress.hang_limit_s(progress.TRAINING, 300.0, 3600.0) == 300.0
    assert progress.hang_limit_s(progress.SAVING, 300.0, 3600.0) == 3900.0
    assert progress.hang_limit_s(progress.LOADING, 300.0, 3600.0) == progress.START_LIMIT_S


def test_a_record_is_read_as_ages_and_a_torn_one_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "3"
    record = {"pid": 5, "phase_at_s": 10.0, "tick_at_s": 15.0, "silent_at_s": 19.0, "step": 8, "is_waiting": True}
    path.write_bytes(encode_record(record))
    assert read_rank(path, 3, 20.0) == RankProgress(
        3, 5, step=8, phase_s=10.0, tick_s=5.0, silent_s=1.0, is_waiting=True
    )
    path.write_bytes(encode_record(record)[:40])
    assert read_rank(path, 3, 20.0) is None
    assert read_rank(tmp_path / "4", 4, 20.0) is None


def test_an_attempt_is_described_by_its_last_step(tmp_path: Path) -> None:
    assert read_attempt(tmp_path) is None
    ranks = of(replace(WORKS, tick_s=4.0, step_time_s=0.1), replace(WAITS, tick_s=4.0, step_time_s=0.1))
    write_node(tmp_path, 0, ranks[:1], note="rank 1 is slow")
    write_node(tmp_path, 1, ranks[1:])
    found = read_attempt(tmp_path)
    assert found and found.ranks == tuple(ranks) and found.note == "rank 1 is slow"
    assert replace(found, age_s=0.0).describe() == "step 7, 4.0 s ago, usually 0.10 s a step"
    assert replace(found, age_s=120.0).describe() == "no sign of life for 2 min 00 s; it was at step 7, training"
    saves = replace(found, age_s=0.0, ranks=(replace(WORKS, phase=progress.SAVING, phase_s=5.0),))
    assert saves.describe() == "saving, for 5.0 s; step 7 is done"
