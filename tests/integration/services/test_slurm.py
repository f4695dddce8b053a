"""Runs on a real Slurm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import example_cases
import pytest
import scheduled_cases
from scheduled import Site, losses

pytestmark = pytest.mark.integration


def test_two_jobs_train_on_one_node_at_once(slurm: Site, run_words: list[str], tmp_path: Path) -> None:
    where = ["--set", "launch.scheduler_options=[nodelist=tests-node1]"]
    for ids, log in scheduled_cases.two_jobs_at_once(slurm, run_words, tmp_path, *where):
        assert "NodeList=tests-node1" in slurm.command("scontrol", "show", "job", ids[0])
        assert "disk        " in log


def test_a_run_spans_two_nodes(slurm: Site, run_words: list[str], tmp_path: Path) -> None:
    words = [*run_words, "--experiments_dir", tmp_path, "--experiment", "wide", "--max_steps", 2, "-N", 2, "-G", 1]
    done = slurm.run(scheduled_cases.PRETRAIN, *words, "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "network     ok" in done.stderr and "2 nodes" in done.stderr
    assert sorted(losses(tmp_path / "wide")) == [1, 2]


def test_a_chain_goes_on_where_the_time_was_over_and_a_cancelled_job_saves(
    slurm: Site, run_words: list[str], tmp_path: Path
) -> None:
    def shorten(job: str) -> None:
        slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=1")  # minutes

    words = ["--time_limit", "00:30:00", "--time_margin", "00:01:00"]
    scheduled_cases.chain(slurm, run_words, tmp_path, "scancel", *words, shorten=shorten)


def test_a_run_is_queued_again_by_itself_or_by_slurm_until_it_is_cancelled(
    slurm: Site, run_words: list[str], tmp_path: Path
) -> None:
    def by_itself(job: str) -> None:
        slurm.command("scancel", "--signal=USR1", job)

    def by_slurm(job: str) -> None:
        slurm.command("scontrol", "requeue", job)

    scheduled_cases.queued_again(slurm, run_words, tmp_path, by_itself, by_slurm, "scancel")


def test_the_failing_task_of_an_array_is_run_again_alone(slurm: Site, tokenizer_folder: Path, tmp_path: Path) -> None:
    scheduled_cases.array_with_a_failing_task(slurm, tokenizer_folder, tmp_path)


def test_a_refused_job_shows_slurms_words(slurm: Site, run_words: list[str], tmp_path: Path) -> None:
    scheduled_cases.refused_job(slurm, run_words, tmp_path, "invalid partition specified: nowhere")


def test_the_example_of_shards_makes_them_in_an_array_and_trains(
    slurm: Site, make_hf_llama: Callable[..., Path], tmp_path: Path
) -> None:
    example_cases.shards_and_train(slurm, make_hf_llama(), tmp_path)


def test_the_example_of_a_jsonl_file_prepares_it_in_a_job(
    slurm: Site, make_hf_llama: Callable[..., Path], jsonl_file: Path, tmp_path: Path
) -> None:
    example_cases.jsonl_to_pretrain(slurm, make_hf_llama(), jsonl_file, tmp_path)


def test_saves_are_evaluated_by_a_job_that_follows(slurm: Site, run_words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra `evaluation` is not installed")
    scheduled_cases.evaluated(slurm, run_words, tmp_path)
