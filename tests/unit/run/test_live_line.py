"""The line at the bottom of a terminal."""

from __future__ import annotations

import json
import os
import termios
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.run import progress
from pretrainkit.run.live_line import describe, last_step, live_line
from pretrainkit.run.progress import AttemptProgress, RankProgress, read_attempt

AT_STEP = RankProgress(0, 10, progress.TRAINING, step=50, ticks=90, step_time_s=2.0)
LOADS = RankProgress(0, 10, progress.LOADING, phase_s=12.0)
SAVES = RankProgress(0, 10, progress.SAVING, step=50, phase_s=3.0)
LAST = {"step": 50, "loss": 2.56389, "tokens_per_second": 12_300.0}
HANGS = RankProgress(0, 10, progress.TRAINING, step=50, tick_s=40.0, step_time_s=2.0)


@pytest.mark.parametrize(
    ("rank", "last", "line"),
    [
        (LOADS, {}, "loading the weights  12 s"),
        (AT_STEP, {}, "step 50/200 (25%)  2.00 s a step  5 min 00 s left"),
        (AT_STEP, LAST, "step 50/200 (25%)  loss 2.5639  12.30 k tokens/s  2.00 s a step  5 min 00 s left"),
        (SAVES, LAST, "step 50/200  saving  3 s"),
        (HANGS, {}, "step 50/200 (25%)  no step for 40 s  2.00 s a step  5 min 00 s left"),
    ],
    ids=["phase", "first step", "step", "save", "hang"],
)
def test_the_line_says_what_the_slowest_rank_does(rank: RankProgress, last: dict[str, Any], line: str) -> None:
    assert describe(AttemptProgress(0.0, "", (rank,)), 200, last) == line


def test_the_last_step_is_that_of_the_records(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == {}
    path.write_text(f'{json.dumps(LAST)}\n{{"step": 50, "val_loss": 2.0}}\n{{"event": "checkpoint", "step": 50}}\n')
    assert last_step(path) == LAST


def test_the_log_scrolls_above_the_line_on_a_terminal_and_is_alone_elsewhere(tmp_path: Path) -> None:
    def read() -> AttemptProgress | None:
        return read_attempt(tmp_path)

    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with (
        open(theirs, "w") as terminal,  # noqa: PTH123
        live_line(read, 200, terminal, metrics=tmp_path / "m", before="waiting") as stream,
    ):
        shown = b""
        while b"waiting  1 s" not in shown:
            shown += os.read(ours, 1000)
        stream.write(b"a line of the log\n")
        progress.write_node(tmp_path, 0, [LOADS])
        while b"loading the weights" not in shown:
            shown += os.read(ours, 1000)
    os.close(ours)
    assert b"a line of the log\r\n" in shown
    with (tmp_path / "log").open("w") as file, live_line(read, 200, file, metrics=tmp_path / "m") as stream:
        stream.write(b"a line of the log\n")
    assert (tmp_path / "log").read_bytes() == b"a line of the log\n"
