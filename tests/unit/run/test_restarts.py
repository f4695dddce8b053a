"""A run that fails again and again at the same step stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import EXIT_FAILED, PretrainkitError
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.run.restarts import (
    Attempt,
    attempts,
    idle_restarts,
    last_saved_step,
    refuse_endless_restarts,
)


def record(path: Path, *runs: tuple[int, int]) -> None:
    """Append attempts that start at a step and record their steps up to another."""
    for start, last in runs:
        recorder = RunRecorder(
            path, tokens_per_sample=2, samples_per_step=4, flops_per_token=1.0, max_steps=99, world_size=1
        )
        recorder.event("start", step=start)
        for step in range(start + 1, last + 1):
            recorder.train_step(step, consumed_samples=4 * step, loss=1.0, learning_rate=0.1, grad_norm=None)
            recorder.event("checkpoint", step=step, path="step")


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_new_run_has_no_attempts(metrics: Path) -> None:
    assert attempts(metrics) == [] and idle_restarts(metrics) == 0
    metrics.touch()
    assert attempts(metrics) == []


def test_attempts_are_read_back(metrics: Path) -> None:
    record(metrics, (0, 5), (4, 4), (4, 7))
    assert attempts(metrics) == [Attempt(0, 5), Attempt(4, 4), Attempt(4, 7)]


def test_a_saved_step_counts_where_records_are_rare(metrics: Path) -> None:
    record(metrics, (0, 5))
    with metrics.open("a") as file:
        file.write('{"event": "checkpoint", "step": 7, "path": "step"}\n')
    assert attempts(metrics) == [Attempt(0, 7)]


def test_a_torn_last_line_does_not_count(metrics: Path) -> None:
    record(metrics, (0, 5))
    with metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    assert attempts(metrics) == [Attempt(0, 5)]


@pytest.mark.parametrize("torn", ['{"event": "start", "ti', '{"event": "start"', '{"eve', "\0\0\0"])
def test_a_torn_start_is_none(metrics: Path, torn: str) -> None:
    metrics.write_text(torn)
    assert attempts(metrics) == []
    metrics.unlink()
    record(metrics, (0, 5))
    with metrics.open("a") as file:
        file.write(torn)
    assert attempts(metrics) == [Attempt(0, 5)]
    record(metrics, (5, 7))
    assert attempts(metrics) == [Attempt(0, 5), Attempt(5, 7)]


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
def test_damaged_lines_are_passed_over(metrics: Path, damaged: bytes) -> None:
    metrics.write_bytes(damaged + b"\n")
    assert attempts(metrics) == [] and last_saved_step(metrics) is None
    metrics.unlink()
    record(metrics, (0, 5))
    with metrics.open("ab") as file:
        file.write(damaged)
    assert attempts(metrics) == [Attempt(0, 5)] and last_saved_step(metrics) == 5
    record(metrics, (5, 7))
    assert attempts(metrics) == [Attempt(0, 5), Attempt(5, 7)] and last_saved_step(metrics) == 7


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
def test_restarts_without_a_new_step_are_counted(metrics: Path, runs: list[tuple[int, int]], idle: int) -> None:
    record(metrics, *runs)
    assert idle_restarts(metrics) == idle


def test_a_start_that_was_asked_to_stop_is_not_one_in_vain(metrics: Path) -> None:
    record(metrics, (8, 10), (8, 10), (8, 9))
    for _ in range(5):
        record(metrics, (8, 8))
        RunRecorder(
            metrics, tokens_per_sample=2, samples_per_step=4, flops_per_token=1.0, max_steps=99, world_size=1
        ).event("stopped", step=8)
    assert attempts(metrics)[-1] == Attempt(8, 8, was_stopped=True)
    assert idle_restarts(metrics) == 2


def test_the_fourth_restart_in_vain_is_refused(make_run: Callable[..., ResolvedRun], metrics: Path) -> None:
    record(metrics, (8, 10), (8, 10), (8, 9))
    refuse_endless_restarts(make_run(), "checkpoints/step_00000008")
    record(metrics, (8, 10))
    with pytest.raises(PretrainkitError, match=r"3 restarts.*step 10.*step_00000008(.|\n)*--restart_limit 0") as caught:
        refuse_endless_restarts(make_run(), "checkpoints/step_00000008")
    assert caught.value.exit_code == EXIT_FAILED
    refuse_endless_restarts(make_run(restart_limit=0), None)
    refuse_endless_restarts(make_run(restart_limit=4), None)
