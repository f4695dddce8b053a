from __future__ import annotations

from pathlib import Path

import pytest

from pretrainkit.training.records import RunRecorder, read_metrics


def recorder(path: Path) -> RunRecorder:
    return RunRecorder(
        path,
        tokens_per_sample=128,
        samples_per_step=4,
        flops_per_token=1e9,
        max_steps=10,
        world_size=2,
        peak_flops=1e12,
    )


def test_records_of_several_attempts_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for start, loss in ((0, 3.0), (1, 2.0)):
        attempt = recorder(path)
        attempt.event("start", step=start)
        attempt.start(start)
        attempt.train_step(start + 1, consumed_samples=4 * (start + 1), loss=loss, learning_rate=1e-3, grad_norm=None)
        attempt.validation(start + 1, loss=loss + 1)
    records = read_metrics(path)
    assert [record.get("loss") for record in records] == [None, 3.0, None, None, 2.0, None]
    assert [record.get("val_loss") for record in records] == [None, None, 4.0, None, None, 3.0]
    assert records[4]["tokens"] == 1024


def test_rate_is_the_mean_since_the_last_record(tmp_path: Path) -> None:
    attempt = recorder(tmp_path / "metrics.jsonl")
    attempt.start(0)
    attempt.train_step(5, consumed_samples=20, loss=3.0, learning_rate=1e-3, grad_norm=1.0)
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["tokens_per_second_per_rank"] * 2 - record["tokens_per_second"] < 0.02
    assert record["tokens"] == 5 * 512


def test_time_of_evaluations_and_saves_is_left_out_and_that_of_steps_is_not(tmp_path: Path) -> None:
    attempt = recorder(tmp_path / "metrics.jsonl")
    attempt.start(0)
    attempt.skip_time(-1000.0)  # as if steps had taken that long
    attempt.skip_time(400.0)
    attempt.train_step(6, consumed_samples=24, loss=3.0, learning_rate=1e-3, grad_norm=1.0)
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["step_time_s"] == pytest.approx(100, rel=0.01)


def test_the_share_of_positions_without_a_loss_is_a_mean_over_microbatches(tmp_path: Path) -> None:
    import torch

    attempt = recorder(tmp_path / "metrics.jsonl")
    attempt.start(0)
    attempt.padding(torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    attempt.padding(torch.ones(2, 2))
    for step in (1, 2):
        attempt.train_step(step, consumed_samples=4 * step, loss=3.0, learning_rate=1e-3, grad_norm=1.0)
    assert [record["padding_share"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0.125, None]


def test_a_line_torn_by_a_kill_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    recorder(path).event("start", step=1)
    assert [record.get("step") for record in read_metrics(path)] == [1, 1]


def test_mfu_is_the_share_of_the_peak(tmp_path: Path) -> None:
    attempt = recorder(tmp_path / "metrics.jsonl")
    attempt.start(0)
    attempt.data_wait(1e-6)
    attempt.train_step(1, consumed_samples=4, loss=3.0, learning_rate=1e-3, grad_norm=1.0, peak_memory_gib=1.5)
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["mfu"] == pytest.approx(record["tokens_per_second"] * 1e9 / 2 / 1e12, rel=1e-3)
    assert record["tflops_per_rank"] == pytest.approx(record["mfu"], abs=1e-3)
    assert 0 < record["data_wait_share"] <= 1
    assert record["peak_memory_gib"] == 1.5
