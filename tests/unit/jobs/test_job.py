"""Arrays, resources and names of jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrainkit.config.launch import LaunchConfig
from pretrainkit.errors import RequestError
from pretrainkit.jobs.job import Job, parse_array
from pretrainkit.jobs.registry import SCHEDULERS
from pretrainkit.units import consecutive_ranges

ARRAYS = {
    "0-9": (range(10), 10, None),
    "0-9%4": (range(10), 10, 4),
    "0": ([0], 1, None),
    "3,7": ([3, 7], 10, None),
    "7,3,4": ([3, 4, 7], 10, None),
    "0-8:4": ([0, 4, 8], 10, None),
}


@pytest.mark.parametrize(("text", "expected"), ARRAYS.items(), ids=list(ARRAYS))
def test_an_array_counts_from_0(text: str, expected: tuple) -> None:  # type: ignore[type-arg]
    indices, count, at_once = expected
    array = parse_array(text, None if text.startswith("0-9") or text == "0" else 10)
    assert (array.indices, array.count, array.at_once) == (tuple(indices), count, at_once)


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "0-9%", "0-9%0", "0-9:0", "1,,2", "-1"])
def test_another_array_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--array"):
        parse_array(text, None)


def test_a_task_beyond_the_parts_is_refused() -> None:
    with pytest.raises(RequestError, match="task 10 of 10"):
        parse_array("3,10", 10)


def test_ranges_are_runs_of_tasks() -> None:
    array = parse_array("0,1,2,5,7-8%2", 10)
    assert consecutive_ranges(array.indices) == [(0, 2), (5, 5), (7, 8)] and str(array) == "0-2,5,7-8%2"


NAMES = {"my run": "my_run", "実験": "job", "007": "j007", "-x/../y": "x_.._y", "a" * 99: "a" * 64}


@pytest.mark.parametrize(("text", "name"), NAMES.items())
def test_a_name_suits_every_scheduler(text: str, name: str) -> None:
    assert Job(text, Path("/j"), Path("/j"), ("true",), LaunchConfig(), None).script_name == name


def job(**settings: object) -> Job:
    folder = Path("/jobs/job_001")
    config = LaunchConfig(**settings)  # type: ignore[arg-type]
    return Job("n", folder, folder, ("true",), config, None, on_gpu=True, num_nodes=2, ranks_per_node=4)


def test_numbers_are_filled_into_requests() -> None:
    made = job(executor="sge", resources=("node_f={num_nodes}",), scheduler_options=("-pe mpi {num_ranks}",))
    assert (SCHEDULERS["sge"].resources(made), made.scheduler_options) == (["node_f=2"], ["-pe mpi 8"])
    with pytest.raises(RequestError, match=r"\{nodes\}"):
        SCHEDULERS["sge"].resources(job(executor="sge", resources=("x={nodes}",)))


def test_what_is_unset_is_the_schedulers_own_default() -> None:
    def requested(executor: str) -> tuple[str | None, str | None, list[str]]:
        scheduler, made = SCHEDULERS[executor], job(executor=executor)
        return scheduler.account(made), scheduler.partition(made), scheduler.resources(made)

    assert requested("slurm") == ("root", "defq", ["gpus-per-node=4"])
    assert requested("pbs") == (None, None, ["select=2:ngpus=4", "place=scatter"])
    assert requested("sge") == (None, None, [])
    slurm, pbs, sge = SCHEDULERS.values()
    assert slurm.account(job(executor="slurm", account="", partition="")) is None
    assert pbs.account_words(job(executor="pbs")) == []
    assert pbs.account_words(job(executor="pbs", account="g")) == ["-A", "g"]
    assert sge.account_words(job(executor="sge", account="g", account_option="-g")) == ["-g", "g"]
