from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from tiny_runs import tiny_run

from pretrainkit.models.flops import training_flops_per_token
from pretrainkit.run import metrics
from pretrainkit.run.json_lines import read_records
from pretrainkit.run.metrics import RunRecorder


def recorder(folder: Path, trackers: Sequence[Any] = ()) -> RunRecorder:
    made = RunRecorder(tiny_run(folder, max_steps=10, world_size=2), peak_flops=1e12)
    made.trackers = list(trackers)
    return made


def test_records_of_several_attempts_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for start, loss in ((0, 3.0), (1, 2.0)):
        attempt = recorder(tmp_path)
        attempt.event("start", step=start)
        attempt.start(start)
        attempt.train_step(start + 1, consumed_samples=4 * (start + 1), loss=loss, learning_rate=1e-3, grad_norm=None)
        attempt.validation(start + 1, {"val_loss": loss + 1})
    metrics = read_records(path)
    assert [record.get("loss") for record in metrics] == [None, 3.0, None, None, 2.0, None]
    assert [record.get("val_loss") for record in metrics] == [None, None, 4.0, None, None, 3.0]
    assert metrics[4]["tokens"] == 1024


def test_rate_is_the_mean_since_the_last_record(tmp_path: Path) -> None:
    attempt = recorder(tmp_path)
    attempt.start(0)
    attempt.train_step(5, consumed_samples=20, loss=3.0, learning_rate=1e-3, grad_norm=1.0)
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert record["tokens_per_second_per_rank"] * 2 - record["tokens_per_second"] < 0.02
    assert record["tokens"] == 5 * 512


def test_time_of_evaluations_and_saves_is_left_out_and_that_of_steps_is_not(tmp_path: Path) -> None:
    attempt = recorder(tmp_path)
    attempt.start(0)
    attempt.skip_time(-1000.0)  # as if steps had taken that long
    attempt.skip_time(400.0)
    attempt.train_step(6, consumed_samples=24, loss=3.0, learning_rate=1e-3, grad_norm=1.0)
    assert read_records(tmp_path / "metrics.jsonl")[0]["step_time_s"] == pytest.approx(100, rel=0.01)


def test_the_time_left_is_told_by_usual_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pretrainkit")
    attempt = recorder(tmp_path)
    attempt.start(0)
    for step, taken_s in enumerate((900.0, 10.0, 10.0, 400.0), start=1):
        attempt.skip_time(-taken_s)
        attempt.train_step(step, consumed_samples=4 * step, loss=3.0, learning_rate=1e-3, grad_norm=1.0)
    assert caplog.messages[2].endswith("1 min 10 s left")
    assert caplog.messages[3].endswith("20 min 30 s left")


def test_the_share_of_positions_without_a_loss_is_a_mean_over_microbatches(tmp_path: Path) -> None:
    import torch

    attempt = recorder(tmp_path)
    attempt.start(0)
    attempt.padding(torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    attempt.padding(torch.ones(2, 2))
    for step in (1, 2):
        attempt.train_step(step, consumed_samples=4 * step, loss=3.0, learning_rate=1e-3, grad_norm=1.0)
    assert [record["padding_share"] for record in read_records(tmp_path / "metrics.jsonl")] == [0.125, None]


def test_a_line_torn_by_a_kill_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    recorder(tmp_path).event("start", step=1)
    assert [record.get("step") for record in read_records(path)] == [1, 1]


def test_mfu_is_the_share_of_the_peak(tmp_path: Path) -> None:
    attempt = recorder(tmp_path)
    attempt.start(0)
    attempt.data_wait(1e-6)
    attempt.train_step(1, consumed_samples=4, loss=3.0, learning_rate=1e-3, grad_norm=1.0, peak_memory_gib=1.5)
    (record,) = read_records(tmp_path / "metrics.jsonl")
    flops = training_flops_per_token(attempt._run.model, 128)
    assert record["mfu"] == pytest.approx(record["tokens_per_second"] * flops / 2 / 1e12, rel=1e-3)
    assert record["tflops_per_rank"] == pytest.approx(record["mfu"], abs=1e-3)
    assert 0 < record["data_wait_share"] <= 1
    assert record["peak_memory_gib"] == 1.5


class FullDisk:
    """A file on a disk that takes only so many bytes."""

    def __init__(self, file: FileIO, room: int) -> None:
        self.file, self.room = file, room

    def fileno(self) -> int:
        return self.file.fileno()

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(data[: self.room])
        self.room -= written
        return written


def test_a_full_disk_costs_no_record_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    attempt = recorder(tmp_path)
    attempt.event("start", step=0)
    disk = FullDisk(attempt._file._file, room=10)
    attempt._file._file = disk  # type: ignore[assignment]
    for step in (1, 2):
        attempt.validation(step, {"val_loss": float(step)})
    assert [record.get("val_loss") for record in read_records(path)] == [None]
    assert caplog.text.count("be written (No space left on device)") == 1
    disk.room = 10_000
    attempt.validation(3, {"val_loss": 3.0})
    assert [record.get("val_loss") for record in read_records(path)] == [None, 1.0, 2.0, 3.0]


def test_a_tracker_that_does_not_end_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "TRACKER_FLUSH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(metrics.psutil.Process, "children", lambda *_, **__: [helper])
    helper, slow, good = MagicMock(), MagicMock(), MagicMock()
    slow.finalize = lambda status: time.sleep(600)
    attempt = recorder(tmp_path)
    attempt.trackers = [slow, good]
    attempt.close()
    assert "not done within 0.2 s" in caplog.text
    good.finalize.assert_called_once()
    helper.kill.assert_called_once()


def test_only_numbers_are_sent(tmp_path: Path) -> None:
    tracker = MagicMock()
    attempt = recorder(tmp_path, [tracker])
    attempt.start(0)
    attempt.event("start", step=0)
    attempt.train_step(1, consumed_samples=4, loss=2.5, learning_rate=1e-3, grad_norm=None)
    (values, step), _ = tracker.log_metrics.call_args
    assert step == 1 and values["loss"] == 2.5 and not {"step", "grad_norm", "padding_share"} & set(values)
    assert all(isinstance(value, (int, float)) for value in values.values()) and tracker.log_metrics.call_count == 1


def test_a_tracker_that_fails_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        name, calls = "Broken", 0

        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            self.calls += 1
            raise RuntimeError("no server")

        def finalize(self, status: str) -> None:
            self.calls += 1

    broken = Broken()
    attempt = recorder(tmp_path, [broken])
    attempt.validation(1, {"val_loss": 1.0})
    attempt.validation(2, {"val_loss": 2.0})
    attempt.close()
    assert (
        broken.calls == 1
        and "Broken failed and gets no more records of this attempt: RuntimeError('no server')" in caplog.text
    )
    assert len(read_records(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize(
    ("log_interval", "logged"), [(None, [1, *range(5, 101, 5)]), (1, [*range(1, 101)]), (25, [25, 50, 75, 100])]
)
def test_auto_records_every_step_and_logs_one_in_twenty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_interval: int | None, logged: list[int]
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(metrics.log, "info", lines.append)
    attempt = RunRecorder(tiny_run(tmp_path, max_steps=100, log_interval=log_interval))
    attempt.start(0)
    steps = range(log_interval or 1, 101, log_interval or 1)
    for step in steps:
        attempt.train_step(step, consumed_samples=4 * step, loss=1.0, learning_rate=0.1, grad_norm=None)
    assert [int(line.split()[1].partition("/")[0]) for line in lines] == logged
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == list(steps)
