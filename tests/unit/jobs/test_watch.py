"""Following a job ends with the job's exit code, or says why there is none."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from pretrainkit.jobs import watch
from pretrainkit.jobs.submit import SubmittedJob


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_QUERY_INTERVAL_S", "_LATE_S"):
        monkeypatch.setattr(watch, name, 0.05)


def follow(job: SubmittedJob, *answers: str, continues: bool = False, chain: Sequence[SubmittedJob] = ()) -> int:
    """Follow jobs whose scheduler gives these answers, the last one again and again."""
    left = list(answers)
    return watch.follow(
        [job, *chain],
        lambda words: left.pop(0) if len(left) > 1 else left[0],
        continues=continues,
        shown=nullcontext(io.BytesIO()),
    )


def test_the_exit_code_is_the_jobs(tmp_path: Path) -> None:
    job = SubmittedJob.of("slurm", "7", tmp_path, (), "sbatch x")
    (tmp_path / "exit-7").write_text("3\n")
    assert follow(job, "RUNNING\n") == 3


def test_the_first_failing_task_is_the_exit_code_of_an_array(tmp_path: Path) -> None:
    job = SubmittedJob.of("slurm", "7", tmp_path, (0, 1, 2), "sbatch x")
    for task, code in enumerate((0, 4, 5)):
        (tmp_path / f"exit-7_{task}").write_text(f"{code}\n")
    assert follow(job, "RUNNING\n") == 4


def test_a_job_without_an_exit_code_is_a_failure_with_the_schedulers_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pretrainkit"), "propagate", True)
    job = SubmittedJob.of("slurm", "7", tmp_path, (), "sbatch x")
    assert follow(job, "RUNNING\n", "", "JobId=7 JobState=NODE_FAIL Reason=NodeDown\n") == 1
    assert "killed, cancelled or lost (JobState=NODE_FAIL; Reason=NodeDown)" in caplog.text


def test_the_end_of_an_array_is_waited_for_once_whatever_its_tasks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("pretrainkit"), "propagate", True)
    job = SubmittedJob.of("pbs", "7[]", tmp_path, tuple(range(50)), "qsub x")
    (tmp_path / "exit-7_0").write_text("0\n")
    assert follow(job, "7[] x B workq", "", "    comment = Job Array Began\n", "asked too often") == 1
    assert "job 7[] ended without an exit code of 49 of its 50 tasks" in caplog.text
    assert "lost (comment = Job Array Began)" in caplog.text


def test_a_requeued_job_is_followed_until_it_is_not_saved_for_another_start(tmp_path: Path) -> None:
    job = SubmittedJob.of("slurm", "7", tmp_path, (), "sbatch x")
    (tmp_path / "exit-7").write_text("85\n")
    (tmp_path / "chain").write_text("7\n")
    assert follow(job, "RUNNING\n", "RUNNING\n", "", continues=True) == 85


def test_a_job_that_pbs_has_submitted_to_continue_is_followed_too(tmp_path: Path) -> None:
    job = SubmittedJob.of("pbs", "7", tmp_path, (), "qsub x")
    (tmp_path / "exit-7").write_text("85\n")
    (tmp_path / "exit-8").write_text("0\n")
    (tmp_path / "pbs-8.log").touch()
    (tmp_path / "chain").write_text("7\n8.server\n")
    assert follow(job, "", continues=True) == 0


@pytest.mark.parametrize("first", ["85\n", "1\n", None], ids=["saved", "hung", "lost"])
def test_a_chain_is_followed_to_its_end_where_a_later_job_goes_on(tmp_path: Path, first: str | None) -> None:
    chain = [SubmittedJob.of("slurm", number, tmp_path, (), "sbatch x") for number in ("7", "8", "9")]
    (tmp_path / "chain").write_text("7\n8\n9\n")
    if first is not None:
        (tmp_path / "exit-7").write_text(first)
    (tmp_path / "exit-8").write_text("0\n")
    (tmp_path / "slurm-8.log").touch()
    assert follow(chain[0], "", continues=True, chain=chain[1:]) == 0


def test_a_chain_that_its_failed_job_has_cancelled_has_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain = [SubmittedJob.of("slurm", number, tmp_path, (), "sbatch x") for number in ("7", "8")]
    (tmp_path / "chain").write_text("7\n8\n")
    (tmp_path / "exit-7").write_text("2\n")
    assert follow(chain[0], "RUNNING\n", "", continues=True, chain=chain[1:]) == 2
    assert "job 8" not in caplog.text
