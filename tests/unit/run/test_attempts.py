"""A run that fails again and again at the same step stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import tiny_run

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import EXIT_FAILED, PretrainkitError
from pretrainkit.run.attempts import (
    last_saved_step,
    read_attempts,
    restarts_without_progress,
)
from pretrainkit.run.checkpoints import Checkpoint
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.json_lines import TAIL_BYTES, read_records
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.run.resume_plan import check_crash_loop, plan_start


def recorder_of(folder: RunFolder) -> RunRecorder:
    return RunRecorder(tiny_run(folder.path, max_steps=99))


def record(folder: RunFolder, *runs: tuple[int, int]) -> None:
    """Append attempts that start at a step and record their steps up to another."""
    for start, last in runs:
        recorder = recorder_of(folder)
        recorder.event("start", step=start)
        for step in range(start + 1, last + 1):
            recorder.train_step(step, consumed_samples=4 * step, loss=1.0, learning_rate=0.1, grad_norm=None)
            recorder.event("checkpoint", step=step, path="step")


def attempts(folder: RunFolder) -> list[tuple[int, int]]:
    """First and last step of every attempt."""
    return [(attempt.start_step, attempt.last_step) for attempt in read_attempts(folder)]


def num_restarts(folder: RunFolder) -> int:
    return restarts_without_progress(read_attempts(folder))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_a_new_run_has_no_attempts(folder: RunFolder) -> None:
    assert attempts(folder) == [] and num_restarts(folder) == 0
    folder.metrics.touch()
    assert attempts(folder) == []


def test_attempts_are_read_back(folder: RunFolder) -> None:
    record(folder, (0, 5), (4, 4), (4, 7))
    assert attempts(folder) == [(0, 5), (4, 4), (4, 7)]


def test_a_saved_step_counts_where_records_are_rare(folder: RunFolder) -> None:
    record(folder, (0, 5))
    with folder.metrics.open("a") as file:
        file.write('{"event": "checkpoint", "step": 7, "path": "step"}\n')
    assert attempts(folder) == [(0, 7)]


def test_a_torn_last_line_does_not_count(folder: RunFolder) -> None:
    record(folder, (0, 5))
    with folder.metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    assert attempts(folder) == [(0, 5)]


@pytest.mark.parametrize("torn", ['{"event": "start", "ti', '{"event": "start"', '{"eve', "\0\0\0"])
def test_a_torn_start_is_not_an_attempt(folder: RunFolder, torn: str) -> None:
    folder.metrics.write_text(torn)
    assert attempts(folder) == []
    folder.metrics.unlink()
    record(folder, (0, 5))
    with folder.metrics.open("a") as file:
        file.write(torn)
    assert attempts(folder) == [(0, 5)]
    record(folder, (5, 7))
    assert attempts(folder) == [(0, 5), (5, 7)]


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"event": "start", "time\0\0\0\n',
        b'{"event": "start"}\n',
        b'{"event": "checkpoint", "ti\0\0\n',
        b'{"event": "checkpoint", "step": 9',
        b'{"step": \0\0\n',
        b'{"step": null}\n',
        b"\xff\xfe\n",
        b"[]\n",
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["metrics.jsonl", "attempts.jsonl"])
def test_damaged_lines_are_skipped(folder: RunFolder, name: str, damaged: bytes) -> None:
    path = folder.path / name
    path.write_bytes(damaged + b"\n")
    assert attempts(folder) == [] and last_saved_step(folder) is None
    path.unlink()
    record(folder, (0, 5))
    with path.open("ab") as file:
        file.write(damaged)
    assert attempts(folder) == [(0, 5)] and last_saved_step(folder) == 5
    record(folder, (5, 7))
    assert attempts(folder) == [(0, 5), (5, 7)] and last_saved_step(folder) == 7


def test_attempts_of_a_version_without_attempts_jsonl_are_taken_over_once(folder: RunFolder) -> None:
    record(folder, (0, 5), (4, 4))
    recorder_of(folder).event("stopped", step=4)
    before = read_attempts(folder)
    folder.attempts.unlink()
    assert read_attempts(folder) == before and before[-1].was_stopped and last_saved_step(folder) == 5
    record(folder, (4, 7))
    assert folder.attempts.exists() and attempts(folder) == [(0, 5), (4, 4), (4, 7)]
    folder.metrics.unlink()
    assert attempts(folder) == [(0, 5), (4, 4), (4, 7)], "a checkpoint of step 7 was saved"


def test_the_last_step_is_found_without_reading_a_long_file(folder: RunFolder) -> None:
    record(folder, (0, 1))
    with folder.metrics.open("a") as file:
        file.writelines(f'{{"step": {step}, "loss": 1.0, "padding": "{"x" * 200}"}}\n' for step in range(2, 9000))
    assert folder.metrics.stat().st_size > TAIL_BYTES and len(read_records(folder.metrics, only_tail=True)) < 6000
    assert attempts(folder) == [(0, 8999)]
    record(folder, (8000, 8001))
    assert attempts(folder) == [(0, 8999), (8000, 8001)]
    assert folder.attempts.stat().st_size < 1000


@pytest.mark.parametrize(
    ("runs", "idle"),
    [
        ([(0, 0)], 0),
        ([(0, 0), (0, 0)], 1),
        ([(0, 10), (0, 10), (0, 10), (0, 10)], 3),
        ([(0, 10), (0, 3), (0, 9)], 2),
        ([(0, 10), (0, 10), (0, 11)], 0),
        ([(0, 10), (0, 10), (0, 11), (10, 11)], 1),
        ([(0, 3), (2, 5), (4, 8)], 0),
    ],
    ids=str,
)
def test_restarts_without_a_new_step_are_counted(folder: RunFolder, runs: list[tuple[int, int]], idle: int) -> None:
    record(folder, *runs)
    assert num_restarts(folder) == idle


def test_a_start_that_was_asked_to_stop_is_not_one_in_vain(folder: RunFolder) -> None:
    record(folder, (8, 10), (8, 10), (8, 9))
    for _ in range(5):
        record(folder, (8, 8))
        recorder_of(folder).event("stopped", step=8)
    last = read_attempts(folder)[-1]
    assert (last.start_step, last.last_step, last.was_stopped) == (8, 8, True)
    assert num_restarts(folder) == 2


def test_the_fourth_restart_in_vain_is_refused(
    make_run: Callable[..., ResolvedRun], save: Callable[..., Checkpoint], folder: RunFolder
) -> None:
    def check(**settings: int) -> None:
        run = make_run(**settings)
        check_crash_loop(run, plan_start(run))

    save(8)
    record(folder, (8, 10), (8, 10), (8, 9))
    check()
    record(folder, (8, 10))
    with pytest.raises(PretrainkitError, match=r"3 restarts.*step 10.*step_00000008(.|\n)*--restart_limit 0") as caught:
        check()
    assert caught.value.exit_code == EXIT_FAILED
    check(restart_limit=0)
    check(restart_limit=4)
