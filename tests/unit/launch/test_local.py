"""An attempt on this machine is one command whose every word is fixed, and the environment of its ranks."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from tiny_runs import tiny_run

from pretrainkit.jobs.run_job import rank_environment
from pretrainkit.launch.local import LaunchPlan
from pretrainkit.launch.node import build_parser, threads_per_rank

FOLDER = Path("/e x/$HOME")
PLAN = LaunchPlan(
    tiny_run(FOLDER, world_size=2), FOLDER / "run.json", FOLDER / "logs" / "attempt_1", Path("/p/train.py")
)


def test_the_interpreter_is_this_one_whatever_path_says() -> None:
    assert PLAN.node_command[:3] == [sys.executable, "-m", "pretrainkit.launch.node"]
    assert PLAN.rank_command == [sys.executable, "/p/train.py", "--run", "/e x/$HOME/run.json"]


def test_the_node_understands_its_arguments() -> None:
    arguments = build_parser().parse_args(PLAN.node_command[3:])
    assert (arguments.ranks, arguments.log_dir) == (2, Path("/e x/$HOME/logs/attempt_1"))
    assert arguments.command == ["/p/train.py", "--run", "/e x/$HOME/run.json"]


@pytest.mark.parametrize(("ranks", "num_cpus", "threads"), [(2, 8, "4"), (8, 2, "1"), (3, 8, "2")])
def test_cores_are_shared_out(ranks: int, num_cpus: int, threads: str) -> None:
    assert threads_per_rank(ranks, num_cpus) == threads


def test_only_cpu_ranks_are_bound_to_the_loopback() -> None:
    assert rank_environment(PLAN.run)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in rank_environment(dataclasses.replace(PLAN.run, accelerator="gpu"))
