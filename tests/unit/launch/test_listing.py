"""pretrain.py --list: the state of each experiment, from its files."""

from __future__ import annotations

import json
import os
import runpy
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_run

from pretrainkit.config.run_file import write_run
from pretrainkit.jobs.submit import SubmittedJob
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.run.progress import RankProgress, write_node

pretrain = runpy.run_path(str(Path(__file__).parents[3] / "pretraining" / "pretrain.py"))["main"]


def start(home: Path, name: str, steps: int, outcome: dict[str, Any] | None = None) -> Path:
    """An experiment of 20 steps, of which some are done, as its only start left it."""
    folder = RunFolder(home / name)
    run = tiny_run(folder.path)
    folder.path.mkdir()
    write_run(folder.run_file, run)
    log_dir = folder.new_attempt_folder()
    recorder = RunRecorder(run)
    recorder.event("start", step=0, mode="random")
    for step in range(1, steps + 1):
        recorder.train_step(step, consumed_samples=4 * step, loss=5 - step / 10, learning_rate=0.1, grad_norm=None)
    recorder.validation(steps, {"val_loss": 6.0})
    if outcome:
        (log_dir / "outcome.json").write_text(json.dumps(outcome))
    return log_dir


def test_each_experiment_has_its_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start(tmp_path, "done", 20, {"exit_code": 0})
    start(tmp_path, "stopped", 6, {"exit_code": 85})
    start(tmp_path, "failed", 3, {"exit_code": 1, "reason": "rank 1 failed"})
    start(tmp_path, "begun", 0)
    an_hour_ago = time.time() - 3600
    os.utime(start(tmp_path, "lost", 2), (an_hour_ago, an_hour_ago))
    write_node(start(tmp_path, "live", 4), 0, [RankProgress(0, step=4)])
    for name in ("queued", "ended"):
        jobs = RunFolder(tmp_path / name).jobs
        folder = jobs / "job_001"
        folder.mkdir(parents=True)
        job = SubmittedJob.of("slurm", "81224", folder, (), "sbatch job.slurm.sh")
        (jobs / "jobs.jsonl").write_text(json.dumps(asdict(job)) + "\n")
        if name == "ended":
            Path(job.exit_files[0]).write_text("1\n")
    (tmp_path / "new").mkdir()
    write_run(tmp_path / "new" / "run.json", tiny_run(tmp_path / "new"))
    (tmp_path / ".converted").mkdir()
    assert pretrain(["--list", "--experiments_dir", str(tmp_path), "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    states = {name: each["state"] for name, each in found.items()}
    assert states.pop("queued") in ("queued?", "lost"), "lost if a scheduler answers here, and doesn't know it"
    assert states == {
        "done": "done",
        "stopped": "stopped",
        "failed": "failed (1)",
        "begun": "starting",
        "lost": "lost",
        "live": "running",
        "ended": "failed (1)",
        "new": "new",
    }
    assert found["queued"]["job_id"] == "81224"
    assert found["stopped"]["step"] == 6 and found["stopped"]["loss"] == pytest.approx(4.4)
    assert found["stopped"]["val_loss"] == 6.0 and found["stopped"]["max_steps"] == 20
    assert pretrain(["--list", "--experiments_dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["experiment", "state", "step", "loss", "held-out", "job"]
    assert "done        done        20/20  3.0000  6.0000" in lines
    assert len(lines) == 10


def test_a_run_of_long_ago_that_says_nothing_is_not_running(tmp_path: Path) -> None:
    log_dir = start(tmp_path, "old", 4)
    write_node(log_dir, 0, [RankProgress(0, step=4)])
    record = json.loads((log_dir / "progress_0.json").read_text())
    (log_dir / "progress_0.json").write_text(json.dumps({**record, "time": time.time() - 900}))
    from pretrainkit.launch.listing import list_experiments

    assert [each.state for each in list_experiments(tmp_path)] == ["lost"]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain(["--list", "--experiments_dir", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err
