"""An experiment's records become one course, however often it was started."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import tiny_run

from pretrainkit.errors import RequestError
from pretrainkit.run.history import read_history
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.run.plot import plot_history

REPOSITORY = Path(__file__).parents[3]


def train(experiment: Path, begin: int, end: int, loss: float) -> None:
    recorder = RunRecorder(tiny_run(experiment, world_size=2))
    recorder.event("start", step=begin, mode="continue" if begin else "random", world_size=2)
    for step in range(begin + 1, end + 1):
        recorder.train_step(
            step,
            consumed_samples=4 * step,
            loss=math.nan if step == 9 else loss,
            learning_rate=step / 100,
            grad_norm=None,
        )
        if step % 4 == 0:
            recorder.validation(step, {"val_loss": loss + 1})


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    train(tmp_path, 0, 6, 5.0)
    train(tmp_path, 4, 5, 4.0)
    train(tmp_path, 4, 10, 3.0)
    (tmp_path / "run.json").write_text('{"max_steps": 20}')
    for number, outcome in ((1, '{"exit_code": 1, "reason": "rank 1 failed"}'), (2, None), (10, '{"exit_code": 85}')):
        folder = tmp_path / "logs" / f"attempt_{number}"
        folder.mkdir(parents=True)
        if outcome:
            (folder / "outcome.json").write_text(outcome)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\0" * 40 + "\n")  # what a power cut leaves
        file.write('{"step": 11, "lo')
    return tmp_path


def test_replayed_steps_count_once_as_they_were_done_last(experiment: Path) -> None:
    history = read_history(experiment)
    assert [record["step"] for record in history.steps] == list(range(1, 11))
    assert [record["loss"] for record in history.steps] == [5.0] * 4 + [3.0] * 4 + [None, 3.0]
    assert history.summary["replayed_steps"] == 3
    assert history.validation == ((4, 6.0), (8, 4.0))


def test_starts_logs_and_the_end_are_told(experiment: Path) -> None:
    summary = read_history(experiment).summary
    assert [(start["first_step"], start["last_step"]) for start in summary["starts"]] == [(0, 6), (4, 5), (4, 10)]
    assert (summary["steps_done"], summary["max_steps"], summary["restarts"], summary["idle_restarts"]) == (
        10,
        20,
        2,
        0,
    )
    assert [(log["exit_code"], log["reason"]) for log in summary["logs"]] == [
        (1, "rank 1 failed"),
        (None, ""),
        (85, ""),
    ]
    assert [Path(log["folder"]).name for log in summary["logs"]] == ["attempt_1", "attempt_2", "attempt_10"]


def test_the_command_prints_and_draws(experiment: Path) -> None:
    command = [sys.executable, str(REPOSITORY / "tools" / "inspect_run.py"), str(experiment)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "10 of 20" in text and "rank 1 failed" in text
    assert (experiment / "run.png").read_bytes().startswith(b"\x89PNG")
    shown = subprocess.run([*command, "--json", "--no-plot"], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown)["plot"] is None and json.loads(shown)["loss"] == 3.0


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "start", "time\0\0\0',
        '{"event": "start", "time": "now"}',
        '{"event": "bad_loss"}',
        '{"event": "missed_save"}',
        '{"val_loss": 1.0}',
        "[]",
    ],
)
def test_damaged_lines_are_passed_over(experiment: Path, line: str) -> None:
    before = read_history(experiment)
    metrics = experiment / "metrics.jsonl"
    content = metrics.read_text()
    metrics.write_text(content[: content.rfind("\n") + 1] + line + "\n")
    assert read_history(experiment) == before


@pytest.mark.parametrize("is_asked", [False, True], ids=["by default", "asked for"])
def test_a_picture_that_cant_be_written_costs_no_summary(experiment: Path, is_asked: bool) -> None:
    (experiment / "run.png").mkdir()
    command = [sys.executable, str(REPOSITORY / "tools" / "inspect_run.py"), str(experiment)]
    done = subprocess.run(
        [*command, *(["--plot", str(experiment / "run.png")] if is_asked else [])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == is_asked
    assert "the picture can't be written: Is a directory" in done.stderr and "Traceback" not in done.stderr
    assert "checkpoint" in done.stdout and "plot" not in done.stdout


def test_a_step_without_its_speed_counts(experiment: Path) -> None:
    train(experiment, 10, 10, 3.0)  # cuts the torn line
    with (experiment / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 1.0, "learning_rate": 0.1}\n')
    history = read_history(experiment)
    assert history.steps[-1]["loss"] == 1.0 and history.attempts[-1].last_step == 11
    assert history.describe() and history.summary["tokens_per_second"]
    plot_history(history, experiment / "run.png")


def test_an_experiment_without_steps_is_drawn_too(tmp_path: Path) -> None:
    train(tmp_path, 0, 0, 1.0)
    history = read_history(tmp_path)
    assert history.summary["loss"] is None and "no tokens" in history.describe()
    plot_history(history, tmp_path / "run.png")


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"metrics\.jsonl"):
        read_history(tmp_path)


def test_an_attempt_that_failed_before_its_first_record_is_told(tmp_path: Path) -> None:
    attempt = tmp_path / "logs" / "attempt_1"
    attempt.mkdir(parents=True)
    (attempt / "outcome.json").write_text('{"exit_code": 1, "reason": "no GPU"}')
    history = read_history(tmp_path)
    assert history.steps == () and "exit code 1, no GPU" in history.describe()
    plot_history(history, tmp_path / "run.png")


def test_a_schedulers_jobs_and_their_logs_are_told(experiment: Path) -> None:
    folder = experiment / "jobs" / "job_001"
    folder.mkdir(parents=True)
    (folder / "exit-7").write_text("85\n")
    for number in (7, 8):
        record = {
            "scheduler": "slurm",
            "job_id": str(number),
            "folder": str(folder),
            "logs": [str(folder / f"slurm-{number}.log")],
            "exit_files": [str(folder / f"exit-{number}")],
            "command": "sbatch",
            "time": "now",
        }
        with (folder.parent / "jobs.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
    history = read_history(experiment)
    assert [(job["job_id"], job["exit_code"]) for job in history.summary["jobs"]] == [("7", 85), ("8", None)]
    assert f"slurm 7  log {folder}/slurm-7.log  exit code 85" in history.describe()
    assert history.summary["jobs"][1]["log"] == str(folder / "slurm-8.log")
    assert "slurm-8.log  queued" in history.describe()
    (folder / "exit-8.1").write_text("85\n")  # it was requeued, and has begun again
    (folder / "slurm-8.log").touch()
    history = read_history(experiment)
    assert history.summary["jobs"][1]["state"] == "running"
    assert f"an earlier start: log {folder}/slurm-8.1.log  exit code 85" in history.describe()
    (folder / "slurm-8.2.log").touch()  # its node died
    (folder / "chain").write_text("7\n8\n9.server\n")  # 8 has submitted another
    history = read_history(experiment)
    assert f"an earlier start: log {folder}/slurm-8.2.log  no exit code" in history.describe()
    assert [job["job_id"] for job in history.summary["jobs"]] == ["7", "8", "9"]
    assert f"slurm 9  log {folder}/slurm-9.log  queued" in history.describe()
