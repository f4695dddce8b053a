"""The nodes of a job start together, end with one exit code, and leave no rank behind, whichever of them fails.

The nodes are processes of this machine, and the ranks small scripts. Real schedulers are in services/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pretrainkit.config.run_file import read_run, write_run
from pretrainkit.config.schema import Kernels

pytestmark = pytest.mark.integration
DEADLINE_S = 120

RANK = """
import os, signal, sys, time
rank, mode = int(os.environ["RANK"]), sys.argv[2]
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "local", os.environ["LOCAL_RANK"], flush=True)
if mode == "meet":
    from torch.distributed import init_process_group, all_reduce
    import torch
    init_process_group("gloo")
    ranks = torch.tensor([rank])
    all_reduce(ranks)
    print("sum", int(ranks), flush=True)
    os._exit(0)
if mode == "end":
    os._exit(0)
if mode.endswith("run.json"):
    print("reads", mode, flush=True)
    os._exit(0)
if mode == f"fail{rank}":
    print("the reason", file=sys.stderr, flush=True)
    os._exit(7)
print("ready", flush=True)
while not stopping:
    time.sleep(0.05)
print("saved", flush=True)
os._exit(85)
"""


IMPATIENT = """
from pretrainkit.jobs import rendezvous
rendezvous.HEARTBEAT_S, rendezvous.DEAD_AFTER_S, rendezvous.END_S = 0.5, 6, 6
from pretrainkit.launch import node
raise SystemExit(node.main())
"""
"""A node that waits less long for others."""


class Job:
    """The nodes of a job that were started."""

    def __init__(
        self, folder: Path, mode: str, num_nodes: int = 2, *, is_impatient: bool = False, **environment: str
    ) -> None:
        self.folder = folder
        (folder / "job").mkdir(exist_ok=True)
        words = ["--ranks", "2", "--experiment_dir", str(folder), "--job_dir", str(folder / "job"), "--no_check"]
        module = ["-c", IMPATIENT] if is_impatient else ["-m", "pretrainkit.launch.node"]
        command = [sys.executable, *module, *words, "--num_nodes", str(num_nodes)]
        command += ["--", str(folder / "rank.py"), "--run", mode]
        start = f"s{time.monotonic_ns()}"
        self.nodes = []
        for node in range(num_nodes):
            variables = {"PRETRAINKIT_NODE": str(node), "PRETRAINKIT_START": start, "PRETRAINKIT_JOB_ID": "17"}
            with (folder / f"node_{node}.terminal").open("ab") as terminal:
                self.nodes.append(
                    subprocess.Popen(
                        command,
                        stdout=terminal,
                        stderr=terminal,
                        env={**os.environ, **variables, "GLOO_SOCKET_IFNAME": "lo", **environment},
                        start_new_session=True,
                    )
                )

    def wait(self) -> list[int]:
        return [node.wait(timeout=DEADLINE_S) for node in self.nodes]

    def wait_until_ready(self) -> None:
        files, end_s = [self.log_dir / f"rank_{rank}.out" for rank in range(4)], time.monotonic() + DEADLINE_S
        while not all(file.exists() and "ready" in file.read_text() for file in files):
            assert time.monotonic() < end_s, self.terminal(0) + self.terminal(1)
            time.sleep(0.05)

    @property
    def log_dir(self) -> Path:
        return self.folder / "logs" / "attempt_1"

    @property
    def outcome(self) -> dict:  # type: ignore[type-arg]
        return json.loads((self.log_dir / "outcome.json").read_text())

    def terminal(self, node: int) -> str:
        return (self.folder / f"node_{node}.terminal").read_text()

    def left(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                if str(self.folder) in words and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(words)
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    (tmp_path / "rank.py").write_text(RANK)
    jobs: list[Job] = []

    def make(mode: str, **settings: Any) -> Job:
        jobs.append(Job(tmp_path, mode, **settings))
        return jobs[-1]

    yield make
    for job in jobs:
        for node in job.nodes:
            node.kill()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(tmp_path) in " ".join(process.cmdline()):
                process.kill()


def test_ranks_of_all_nodes_are_numbered_and_meet(start: Callable[..., Job]) -> None:
    job = start("meet")
    assert job.wait() == [0, 0], job.terminal(0) + job.terminal(1)
    texts = [(job.log_dir / f"rank_{rank}.out").read_text() for rank in range(4)]
    assert [text.splitlines()[0] for text in texts] == [f"rank {rank} of 4 local {rank % 2}" for rank in range(4)]
    assert all("sum 6" in text for text in texts)
    assert job.outcome["exit_code"] == 0 and job.left() == []
    assert "rank 0 of 4" in job.terminal(0)  # what people look at while it runs
    assert json.loads((job.log_dir / "job.json").read_text())["job_id"] == "17"


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_fails_ends_all_nodes_with_its_code(start: Callable[..., Job], rank: int) -> None:
    job = start(f"fail{rank}")
    assert job.wait() == [7, 7], job.terminal(0) + job.terminal(1)
    assert job.outcome["failed_rank"] == rank and f"node {rank // 2}" in job.outcome["reason"]
    assert job.left() == []


@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_to_one_node_lets_all_save(start: Callable[..., Job], node: int) -> None:
    job = start("save")
    job.wait_until_ready()
    job.nodes[node].send_signal(signal.SIGUSR1)
    assert job.wait() == [85, 85], job.terminal(0) + job.terminal(1)
    assert all("saved" in (job.log_dir / f"rank_{rank}.out").read_text() for rank in range(4))
    assert job.left() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_is_killed_or_freezes_ends_the_other(start: Callable[..., Job], node: int, number: int) -> None:
    job = start("save", is_impatient=True)
    job.wait_until_ready()
    job.nodes[node].send_signal(number)
    assert job.nodes[1 - node].wait(timeout=DEADLINE_S) == 1, job.terminal(0) + job.terminal(1)
    if node == 1:
        assert "node 1 ended without a report: killed, or lost" in job.outcome["reason"]
    if number == signal.SIGSTOP:
        job.nodes[node].send_signal(signal.SIGCONT)
        assert job.nodes[node].wait(timeout=DEADLINE_S) == 1
        assert job.left() == []


def test_the_job_scripts_file_lets_all_save(start: Callable[..., Job]) -> None:
    job = start("save")
    job.wait_until_ready()
    (folder,) = (job.folder / "job" / "nodes").iterdir()
    (folder / "stop").touch()
    assert job.wait() == [85, 85]


def test_a_job_that_only_continues_looks_how_the_last_one_ended(start: Callable[..., Job]) -> None:
    job = start("end")
    assert job.wait() == [0, 0]
    again = start("end", PRETRAINKIT_CONTINUES="1")
    assert again.wait() == [0, 0] and "the run is done" in again.terminal(0)
    assert not (job.folder / "logs" / "attempt_2").exists()
    (job.log_dir / "outcome.json").write_text('{"exit_code": 3, "failed_rank": 1, "reason": "rank 1 failed"}')
    again = start("end", PRETRAINKIT_CONTINUES="1")
    assert again.wait() == [3, 3] and "the run failed" in again.terminal(0)
    (job.log_dir / "outcome.json").unlink()  # killed: goes on
    assert start("end", PRETRAINKIT_CONTINUES="1").wait() == [0, 0]
    assert (job.folder / "logs" / "attempt_2").exists()


def test_jobs_that_never_get_to_a_checkpoint_end(start: Callable[..., Job]) -> None:
    for attempt in range(1, 4):
        job = start("end", num_nodes=1, PRETRAINKIT_CONTINUES="1")
        assert job.wait() == [0]
        outcome = job.folder / "logs" / f"attempt_{attempt}" / "outcome.json"
        outcome.write_text('{"exit_code": 85, "failed_rank": 0, "reason": "stopped as asked"}')
    job = start("end", num_nodes=1, PRETRAINKIT_CONTINUES="1")
    assert job.wait() == [1] and "3 jobs in a row ended without a new checkpoint" in job.terminal(0)
    checkpoint = job.folder / "checkpoints" / "step_00000007"
    checkpoint.mkdir(parents=True)
    assert start("end", num_nodes=1, PRETRAINKIT_CONTINUES="1").wait() == [1], "a save that was cut short"
    (checkpoint / "complete.json").touch()
    assert start("end", num_nodes=1, PRETRAINKIT_CONTINUES="1").wait() == [0]


def test_two_jobs_of_one_experiment_do_not_run_at_once(start: Callable[..., Job]) -> None:
    job = start("save")
    job.wait_until_ready()
    other = start("end")
    assert other.wait() == [2, 2] and "running already" in other.terminal(0)
    job.nodes[0].send_signal(signal.SIGTERM)
    assert job.wait() == [85, 85]


def test_another_number_of_nodes_than_the_job_has_is_refused(start: Callable[..., Job]) -> None:
    job = start("end", SLURM_JOB_NODELIST="n[1-3]")
    assert job.wait() == [2, 2] and "the job has 3 nodes: n1, n2, n3" in job.terminal(0)
    job = start("end", SLURM_JOB_NODELIST="n[1-2]", SLURM_STEP_TASKS_PER_NODE="2(x2)")
    assert job.wait() == [2, 2] and "srun started 2 tasks on a node" in job.terminal(0)


def test_node_0_chooses_the_kernels_of_all_ranks(
    start: Callable[..., Job], make_hf_llama: Callable[..., Path], write_tiny_run: Callable[..., Path], tmp_path: Path
) -> None:
    run_file = tmp_path / "run.json"
    run = dataclasses.replace(read_run(write_tiny_run(make_hf_llama(), "tiny")), kernels=None)
    write_run(run_file, run)
    job = start(str(run_file))
    assert job.wait() == [0, 0], job.terminal(0)
    attempt_file = job.log_dir / "run.json"
    assert read_run(attempt_file) == read_run(run_file) == dataclasses.replace(run, kernels=Kernels(*8 * ["torch"]))
    for rank in range(4):
        assert f"reads {attempt_file}" in (job.log_dir / f"rank_{rank}.out").read_text()

    training = dataclasses.replace(run.config.training, fused_kernels="rotary")
    write_run(run_file, dataclasses.replace(run, config=dataclasses.replace(run.config, training=training)))
    job = start(str(run_file))
    assert job.wait() == [2, 2], job.terminal(0)
    assert "fused rotary can't be used" in job.terminal(0)
    assert json.loads((tmp_path / "logs" / "attempt_2" / "outcome.json").read_text())["exit_code"] == 2
