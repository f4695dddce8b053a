"""Runs on a real OpenPBS."""

from __future__ import annotations

from pathlib import Path

import pytest
import scheduled_cases
from scheduled import Site, job_ids, losses

pytestmark = pytest.mark.integration


def test_two_jobs_train_on_one_node_at_once(openpbs: Site, run_words: list[str], tmp_path: Path) -> None:
    for _, log in scheduled_cases.two_jobs_at_once(openpbs, run_words, tmp_path):
        assert "disk        " in log and "time left   ok" in log


def test_a_run_spans_two_nodes(openpbs: Site, run_words: list[str], tmp_path: Path) -> None:
    words = [*run_words, "--experiments_dir", tmp_path, "--experiment", "wide", "--max_steps", 2, "-N", 2, "-G", 1]
    done = openpbs.run(scheduled_cases.PRETRAIN, *words, "--set", "launch.node_launcher=pbsdsh", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "network     ok" in done.stderr and "2 nodes" in done.stderr
    assert sorted(losses(tmp_path / "wide")) == [1, 2]


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
    def by_itself(job: str) -> None:
        openpbs.command("qsig", "-s", "USR1", job)

    def by_pbs(job: str) -> None:
        openpbs.command("qrerun", job)

    scheduled_cases.queued_again(openpbs, run_words, tmp_path, by_itself, by_pbs, "qdel")


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


def test_saves_are_evaluated_by_a_job_that_follows(openpbs: Site, run_words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra `evaluation` is not installed")
    scheduled_cases.evaluated(openpbs, run_words, tmp_path)
