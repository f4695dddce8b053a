"""Whatever ends a run, it can go on: kills while saving, signals, a full disk.

PRETRAINKIT_TRIALS sets how many kills and signals are tried; the suite tries few.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks

from pretrainkit.errors import EXIT_STOPPED_AFTER_SAVING
from pretrainkit.run import checkpoints as resume
from pretrainkit.run.attempts import read_attempts, restarts_without_progress
from pretrainkit.run.folder import COMMIT_MARK, RunFolder
from pretrainkit.run.json_lines import read_records

pytestmark = pytest.mark.integration
TRIALS = int(os.environ.get("PRETRAINKIT_TRIALS", "2"))
DEADLINE_S = 120


@pytest.fixture(scope="module")
def tiny(make_hf_llama: Callable[..., Path]) -> Path:
    return make_hf_llama()


def wait_for_step(folder: Path, attempt: int, step: int) -> None:
    """Wait until the attempt of this number has recorded a step."""
    end = time.monotonic() + DEADLINE_S
    while True:
        found = read_attempts(RunFolder(folder))
        if len(found) == attempt and found[-1].last_step >= step:
            return
        assert time.monotonic() < end, (folder / "rank0.log").read_text()[-3000:]
        time.sleep(0.01)


@pytest.mark.parametrize("async_save", ["off", "on"])
def test_a_checkpoint_is_always_there_whenever_a_run_is_killed(
    tiny: Path, tmp_path: Path, write_tiny_run: Callable[..., Path], async_save: str
) -> None:
    settings = {"save_interval": 1, "keep_last": 2, "restart_limit": 0, "async_save": async_save}
    run_file = write_tiny_run(tiny, "killed", max_steps=10**6, **settings)
    checkpoints, log = run_file.parent / "checkpoints", run_file.parent / "rank0.log"
    chance = random.Random(5)
    newest, cut_short = 0, 0
    for attempt in range(1, TRIALS + 1):
        (process,) = ranks.start_ranks(ranks.train_until_stopped, 1, [log], run_file=run_file)
        wait_for_step(run_file.parent, attempt, newest + 1)
        began = time.monotonic()
        while not any(int(mark.parent.name[5:]) > newest for mark in checkpoints.glob("step_????????/complete.json")):
            assert process.is_alive() and time.monotonic() < began + DEADLINE_S, log.read_text()[-3000:]
            time.sleep(0.01)
        # Somewhere within the next saves.
        until = time.monotonic() + chance.uniform(0, 2) * (time.monotonic() - began)
        while time.monotonic() < until:
            assert resume.newest_complete(checkpoints)
            time.sleep(0.05)
        assert process.is_alive(), log.read_text()[-3000:]
        ranks.kill_with_children([process])
        found = resume.newest_complete(checkpoints)
        assert found and found.step > newest
        newest = found.step
        cut_short += any(not (folder / COMMIT_MARK).exists() for folder in checkpoints.glob("step_????????"))
    print(f"{TRIALS} kills, {cut_short} in the midst of a save, {newest} steps")
    # The last one loads, as those before did: each attempt went on from there.
    final = write_tiny_run(tiny, "killed", max_steps=newest + 1, **settings)
    ranks.run_ranks(ranks.train_rank, 1, run_file.parent, run_file=final)
    assert read_attempts(RunFolder(run_file.parent))[-1].start_step == newest


@pytest.mark.parametrize(
    ("number", "world_size"), [(signal.SIGTERM, 1), (signal.SIGUSR1, 2)], ids=["SIGTERM", "SIGUSR1"]
)
def test_a_signal_saves_within_a_step(
    tiny: Path, tmp_path: Path, write_tiny_run: Callable[..., Path], number: int, world_size: int
) -> None:
    run_file = write_tiny_run(tiny, "stopped", max_steps=10**6, save_interval=10**6, data_parallel=world_size)
    checkpoints = run_file.parent / "checkpoints"
    logs = [run_file.parent / f"rank{rank}.log" for rank in range(world_size)]
    metrics, chance, saved = run_file.parent / "metrics.jsonl", random.Random(number), 0
    for attempt in range(1, (TRIALS if number == signal.SIGTERM else 1) + 1):
        processes = ranks.start_ranks(ranks.train_until_stopped, world_size, logs, run_file=run_file)
        wait_for_step(run_file.parent, attempt, saved + chance.randint(1, 6))
        time.sleep(chance.uniform(0, 0.05))
        before = read_attempts(RunFolder(metrics.parent))[-1].last_step
        os.kill(processes[-1].pid, number)  # the others hear of it from this one
        for process, log in zip(processes, logs, strict=True):
            process.join(DEADLINE_S)
            assert process.exitcode == EXIT_STOPPED_AFTER_SAVING, log.read_text()[-3000:]
        newest = resume.newest_complete(checkpoints)
        assert newest and newest.step == read_attempts(RunFolder(metrics.parent))[-1].last_step
        assert newest.step <= before + 2  # the step that was running, and one that ended while we looked
        saved = newest.step
    started = [attempt.start_step for attempt in read_attempts(RunFolder(metrics.parent))]
    assert started == sorted(set(started))


def test_a_signal_during_an_evaluation_cuts_it_short(
    tiny: Path, tmp_path: Path, write_tiny_run: Callable[..., Path]
) -> None:
    # One evaluation would take minutes; a run that continues has none before its first step.
    ranks.run_ranks(ranks.train_rank, 1, tmp_path, run_file=write_tiny_run(tiny, "evaluating", max_steps=2))
    run_file = write_tiny_run(tiny, "evaluating", max_steps=10**6, save_interval=10**6, val_interval=3, val_steps=5000)
    log = run_file.parent / "rank0.log"
    (process,) = ranks.start_ranks(ranks.train_until_stopped, 1, [log], run_file=run_file)
    wait_for_step(run_file.parent, 2, 3)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGTERM)
    process.join(20)
    assert process.exitcode == EXIT_STOPPED_AFTER_SAVING, log.read_text()[-3000:]
    newest = resume.newest_complete(run_file.parent / "checkpoints")
    assert newest and newest.step == 3
    records = read_records(run_file.parent / "metrics.jsonl")
    assert not any("val_loss" in record for record in records)  # of some batches it would be another's
    assert records[-1]["event"] == "stopped" and records[-1]["step"] == 3
    assert log.read_text().count("asked to stop: the held-out loss after step 3 is not measured") == 1


def test_a_signal_during_the_evaluation_before_the_first_step_ends_the_run(
    tiny: Path, write_tiny_run: Callable[..., Path]
) -> None:
    run_file = write_tiny_run(tiny, "evaluating", max_steps=10**6, val_interval=3, val_steps=5000)
    log = run_file.parent / "rank0.log"
    (process,) = ranks.start_ranks(ranks.train_until_stopped, 1, [log], run_file=run_file)
    wait_for_step(run_file.parent, 1, 0)
    time.sleep(3.0)
    os.kill(process.pid, signal.SIGTERM)
    process.join(20)
    assert process.exitcode == EXIT_STOPPED_AFTER_SAVING, log.read_text()[-3000:]
    records = read_records(run_file.parent / "metrics.jsonl")
    assert [record.get("event") for record in records] == ["start", "stopped"]
    assert not list((run_file.parent / "checkpoints").glob("step_*"))


def test_a_signal_before_the_first_step_ends_at_once_and_is_no_failed_start(
    tiny: Path, tmp_path: Path, write_tiny_run: Callable[..., Path]
) -> None:
    run_file = write_tiny_run(tiny, "early", max_steps=10**6, save_interval=1)
    log = run_file.parent / "rank0.log"
    for _ in range(5):
        log.unlink(missing_ok=True)
        (process,) = ranks.start_ranks(ranks.train_until_stopped, 1, [log], run_file=run_file)
        end = time.monotonic() + DEADLINE_S
        while not log.exists() or "kernels" not in log.read_text():
            assert process.is_alive() and time.monotonic() < end
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGTERM)
        process.join(DEADLINE_S)
        assert process.exitcode == EXIT_STOPPED_AFTER_SAVING, log.read_text()[-3000:]
    assert restarts_without_progress(read_attempts(RunFolder(run_file.parent))) == 0


def test_a_time_limit_that_is_over_before_the_first_step_stops_and_counts_as_a_restart(
    tiny: Path, tmp_path: Path, write_tiny_run: Callable[..., Path]
) -> None:
    run_file = write_tiny_run(tiny, "late", max_steps=10**6, time_limit="0:00:01", time_margin="0:00:01")
    log = run_file.parent / "rank0.log"
    for restarts in range(2):
        (process,) = ranks.start_ranks(ranks.train_until_stopped, 1, [log], run_file=run_file)
        process.join(DEADLINE_S)
        assert "StoppedError: --time_limit: the time limit is near before the first step" in log.read_text()
        assert restarts_without_progress(read_attempts(RunFolder(run_file.parent))) == restarts
    assert not (run_file.parent / "checkpoints").exists()


def test_a_full_disk_ends_the_run_and_leaves_the_last_good_checkpoint(
    tiny: Path, tmp_path: Path, write_tiny_run: Callable[..., Path]
) -> None:
    run_file = write_tiny_run(tiny, "full", max_steps=2, save_interval=2)
    ranks.run_ranks(ranks.train_rank, 1, run_file.parent, run_file=run_file)
    write_tiny_run(tiny, "full", max_steps=6, save_interval=2)
    log = run_file.parent / "rank0.log"
    (process,) = ranks.start_ranks(ranks.train_until_stopped, 1, [log], run_file=run_file, largest_file=100_000)
    process.join(DEADLINE_S)
    assert process.exitcode == 1
    assert "Error" in log.read_text()
    newest = resume.newest_complete(run_file.parent / "checkpoints")
    assert newest and newest.step == 2
    records = read_records(run_file.parent / "metrics.jsonl")
    assert [record["step"] for record in records if record.get("event") == "checkpoint"] == [2]
    ranks.run_ranks(ranks.train_rank, 1, run_file.parent, run_file=run_file)  # there is room again
    newest = resume.newest_complete(run_file.parent / "checkpoints")
    assert newest and newest.step == 6


def test_processes_that_never_begin_hold_nothing_up(tiny: Path, write_tiny_run: Callable[..., Path]) -> None:
    """Those that read data, for steps and for evaluations, and those that write checkpoints."""
    settings = {"max_steps": 4, "save_interval": 2, "val_interval": 2, "val_steps": 1, "async_save": "on"}
    run_file = write_tiny_run(tiny, "still", data_parallel=2, num_workers=1, **settings)
    ranks.run_ranks(ranks.train_rank_whose_forks_stand_still, 2, run_file.parent, run_file=run_file)
    records = read_records(run_file.parent / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4]
    assert [record["step"] for record in records if "val_loss" in record] == [0, 2, 4]
    assert [checkpoint.step for checkpoint in resume.all_complete(run_file.parent / "checkpoints")] == [2, 4]
    for rank in range(2):
        assert run_file.with_name(f"rank{rank}.log").read_text().count("did not start within 1.0 s") >= 4


def test_a_run_that_gets_no_data_ends(tiny: Path, write_tiny_run: Callable[..., Path]) -> None:
    run_file = write_tiny_run(tiny, "away", num_workers=1)
    with pytest.raises(AssertionError, match="DataLoader worker"):
        ranks.run_ranks(ranks.train_rank_without_data, 1, run_file.parent, run_file=run_file)
    log = run_file.with_name("rank0.log").read_text()
    assert "no data for 2.0 s: killing the DataLoader's workers" in log
    assert "rebuild_storage" in log, "not where a loader's own timeout holds"
