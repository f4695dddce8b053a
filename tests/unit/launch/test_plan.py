"""A plan is a command per node whose every word is fixed, and the environment of its ranks."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from pretrainkit.config.schema import DatasetFacts, LaunchConfig, ModelShape, ResolvedRun, RunConfig
from pretrainkit.launch.node import build_parser, threads_per_rank
from pretrainkit.launch.plan import LaunchPlan, plan_launch

SHAPE = ModelShape("llama", 2, 64, 128, 8, 2, 8, 320, 512, 10000.0, 1e-6, False)


def plan(accelerator: str, ranks: int) -> LaunchPlan:
    run = ResolvedRun(
        config=RunConfig(launch=LaunchConfig(num_gpus=ranks)),
        model=SHAPE,
        dataset=DatasetFacts(("/d",), (), 10, 1, None, "h"),
        experiment_dir="/e x/$HOME",
        hf_folder="/hf",
        initial_weights=None,
        accelerator=accelerator,
        precision="fp32",
        world_size=ranks,
        data_parallel_size=ranks,
        sequence_parallel=False,
        max_steps=1,
        lr_warmup_steps=0,
        lr_decay_steps=1,
        min_lr=0.0,
        samples_per_epoch=1,
        padded_vocab_size=384,
    )
    folder = Path(run.experiment_dir)
    return plan_launch(
        run,
        run_file=folder / "run.json",
        log_dir=folder / "logs" / "attempt_1",
        train_script=Path("/p/train.py"),
    )


def test_the_interpreter_is_this_one_whatever_path_says() -> None:
    made = plan("cpu", 2)
    assert made.node_command[:3] == [sys.executable, "-m", "pretrainkit.launch.node"]
    assert made.rank_command == [sys.executable, "/p/train.py", "--run", "/e x/$HOME/run.json"]


def test_the_node_understands_its_arguments() -> None:
    made = plan("cpu", 2)
    arguments = build_parser().parse_args(made.node_arguments)
    assert (arguments.ranks, arguments.log_dir) == (2, Path("/e x/$HOME/logs/attempt_1"))
    assert arguments.command == ["/p/train.py", "--run", "/e x/$HOME/run.json"]


@pytest.mark.parametrize(("ranks", "num_cpus", "threads"), [(2, 8, "4"), (8, 2, "1"), (3, 8, "2")])
def test_cores_are_shared_out(ranks: int, num_cpus: int, threads: str) -> None:
    assert threads_per_rank(ranks, num_cpus) == threads


def test_only_cpu_ranks_are_bound_to_the_loopback() -> None:
    assert plan("cpu", 1).environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in plan("gpu", 1).environment
    assert dataclasses.is_dataclass(LaunchPlan)
