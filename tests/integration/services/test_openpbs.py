"""Runs on a real OpenPBS."""

from __future__ import annotations

from pathlib import Path

import pytest
import scheduled_cases
from scheduled import Site, job_ids, losses, outcome, wait_until

pytestmark = pytest.mark.integration


def test_two_jobs_train_on_one_node_at_once(openpbs: Site, run_words: list[str], tmp_path: Path) -> None:
    for _, log in scheduled_cases.two_jobs_at_once(openpbs, run_words, tmp_path):
        assert "disk        " in log and "time left   ok" in log


def test_a_chain_goes_on_where_the_time_was_over_and_a_cancelled_job_saves(
    openpbs: Site, run_words: list[str], tmp_path: Path
) -> None:
    def shorten(job: str) -> None:
        openpbs.command("qalter", "-l", "walltime=00:00:10", job)  # PBS ends the job, since that is over

    words = ["--time_limit", "00:30:00", "--time_margin", "00:01:00", "-G", "1", "-P", "1"]
    scheduled_cases.chain(openpbs, run_words, tmp_path, "qdel", *words, shorten=shorten)


def test_a_run_is_queued_again_by_itself_or_by_pbs_until_it_is_cancelled(
    openpbs: Site, run_words: list[str], tmp_path: Path
) -> None:
    experiment = tmp_path / "again"
    request = [*run_words, "--experiments_dir", tmp_path, "--experiment", "again", "--max_steps", 100000, "-G", 1]
    request += ["-P", 1, "--time_limit", "00:30:00", "--time_margin", "00:01:00", "--set", "launch.check_nodes=false"]

    def stop(attempt: int, *command: str) -> None:
        """Let an attempt train, then stop it."""
        earlier = max(losses(experiment), default=0)
        wait_until(lambda: max(losses(experiment), default=0) > earlier, f"step of attempt {attempt}")
        openpbs.command(*command)
        wait_until(lambda: outcome(experiment, attempt), f"end of attempt {attempt}")
        assert outcome(experiment, attempt)["exit_code"] == 85

    submitted = openpbs.run(scheduled_cases.PRETRAIN, *request, "--requeue")
    (first,) = job_ids(submitted.stdout)
    stop(1, "qsig", "-s", "USR1", first)
    chain = experiment / "jobs" / "job_001" / "chain"
    wait_until(lambda: len(chain.read_text().splitlines()) == 2, "second job")
    second = chain.read_text().splitlines()[1].partition(".")[0]
    refused = openpbs.run(scheduled_cases.PRETRAIN, *request)
    assert refused.returncode == 2 and f"job {second} of this experiment" in refused.stderr
    stop(2, "qrerun", second)
    stop(3, "qdel", second)
    wait_until(lambda: not openpbs.is_there(second), "end of the second job")
    assert len(chain.read_text().splitlines()) == 2


def test_the_failing_task_of_an_array_is_run_again_alone(openpbs: Site, tokenizer_folder: Path, tmp_path: Path) -> None:
    scheduled_cases.array_with_a_failing_task(openpbs, tokenizer_folder, tmp_path)


def test_an_array_is_followed_until_it_is_cancelled(openpbs: Site, tmp_path: Path) -> None:
    words = ["--input_dir", tmp_path, "--output_dir", tmp_path / "shards", "--model_id", "x", "--array", "0-3%2"]
    follower = openpbs.start("tools/make_shards.py", *words, "--cpus_per_task", 99, "--follow", cwd=tmp_path)
    assert follower.stdout
    (array,) = job_ids(follower.stdout.readline())  # it waits for a node with so many CPUs
    assert array.endswith("[]") and openpbs.is_there(array)
    openpbs.command("qdel", array)
    _, stderr = follower.communicate(timeout=120)
    assert follower.returncode == 1 and f"qdel '{array}'" in stderr, stderr
    assert f"job {array} ended without an exit code of 4 of its 4 tasks" in stderr and not openpbs.is_there(array)


def test_a_refused_job_shows_openpbss_words(openpbs: Site, run_words: list[str], tmp_path: Path) -> None:
    scheduled_cases.refused_job(openpbs, run_words, tmp_path, "qsub: Unknown queue")
