"""Runs on a real Grid Engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import example_cases
import pytest
import scheduled_cases
from scheduled import Site

pytestmark = pytest.mark.integration


def test_two_jobs_train_on_one_node_at_once(grid_engine: Site, run_words: list[str], tmp_path: Path) -> None:
    for _, log in scheduled_cases.two_jobs_at_once(grid_engine, run_words, tmp_path):
        assert "disk        " in log


def test_a_chain_goes_on_where_the_time_was_over_and_a_cancelled_job_saves(
    grid_engine: Site, run_words: list[str], tmp_path: Path
) -> None:
    # Long enough to begin to train on a busy machine. The ranks of two_jobs_at_once and of Slurm's chain are two.
    words = ["--time_limit", "00:02:00", "--time_margin", "00:00:20", "-G", "1", "-P", "1"]
    scheduled_cases.chain(grid_engine, run_words, tmp_path, "qdel", *words, shorten=lambda job: None)


def test_a_run_is_queued_again_by_itself_or_by_grid_engine_until_it_is_cancelled(
    grid_engine: Site, run_words: list[str], tmp_path: Path
) -> None:
    def by_itself(job: str) -> None:
        (start,) = (tmp_path / "again" / "jobs" / "job_001" / "nodes").iterdir()
        (start / "stop").touch()  # as when its time is over: Grid Engine has no signal for a user to send

    def by_grid_engine(job: str) -> None:
        grid_engine.command("qmod", "-rj", job)

    scheduled_cases.queued_again(grid_engine, run_words, tmp_path, by_itself, by_grid_engine, "qdel")


def test_the_failing_task_of_an_array_is_run_again_alone(
    grid_engine: Site, tokenizer_folder: Path, tmp_path: Path
) -> None:
    scheduled_cases.array_with_a_failing_task(grid_engine, tokenizer_folder, tmp_path)


def test_a_refused_job_shows_grid_engines_words(grid_engine: Site, run_words: list[str], tmp_path: Path) -> None:
    scheduled_cases.refused_job(grid_engine, run_words, tmp_path, 'unknown queue "nowhere"')


def test_the_example_of_continual_pretraining_ends_in_a_verified_release(
    grid_engine: Site, make_hf_llama: Callable[..., Path], jsonl_file: Path, tmp_path: Path
) -> None:
    documents = [json.loads(line)["text"] for line in jsonl_file.read_text(encoding="utf-8").splitlines()]
    example_cases.continual_pretraining(grid_engine, make_hf_llama(), documents, tmp_path)


def test_saves_are_evaluated_by_a_job_that_follows(grid_engine: Site, run_words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra `evaluation` is not installed")
    scheduled_cases.evaluated(grid_engine, run_words, tmp_path)
