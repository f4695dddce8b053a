"""The preflight as a command: good nodes pass, and the bad one of several is named by all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration
COMMAND = [sys.executable, str(Path(__file__).parents[2] / "tools" / "check_node.py"), "--accelerator", "cpu"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SGE_", "PBS_"))},
    "GLOO_SOCKET_IFNAME": "lo",
}


def run_nodes(folder: Path, words: list[list[str]], start: list[int] | None = None) -> list[tuple[int, str]]:
    """Exit code and output of each of several nodes, all on this machine; `start`: those that are started."""
    common = [*COMMAND, "--output_dir", str(folder), "--num_nodes", str(len(words)), "--meeting", "test"]
    processes = [
        subprocess.Popen(
            [*common, "--node_rank", str(node), *words[node]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        for node in start or range(len(words))
    ]
    outputs = [process.communicate()[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def test_a_good_node(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "--output-dir", str(tmp_path), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    found = {check["name"]: check for check in report["nodes"][0]["checks"]}
    assert found["all-reduce"]["status"] == "ok" and found["all-reduce"]["found"].startswith("2 ranks over gloo")
    assert report["good"] and report["network"] is None
    assert list(tmp_path.iterdir()) == []


def test_two_good_nodes_reach_each_other(tmp_path: Path) -> None:
    (head, table), (other, nothing) = run_nodes(tmp_path, [["-G", "1"], ["-G", "1"]])
    assert (head, other, nothing) == (0, 0, ""), table + nothing
    assert "network     ok       2 ranks on 2 nodes over gloo" in table
    assert list(tmp_path.iterdir()) == []


def test_a_bad_node_is_named_and_all_end_with_1(tmp_path: Path) -> None:
    quick = ["--quick", "--timeout", "60"]
    (head, table), (other, _) = run_nodes(tmp_path, [quick, [*quick, "--needed_space", "9000TB"]])
    assert (head, other) == (1, 1)
    assert table.count("BAD") == 1 and "disk        failed" in table


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    words = ["--quick", "--timeout", "3"]
    [(head, table), (other, _)] = run_nodes(tmp_path, [words, words, words], start=[0, 2])
    assert (head, other) == (1, 1)
    assert "node number 1: BAD" in table and "no report in the shared folder" in table


def test_a_wrong_request_is_refused() -> None:
    done = subprocess.run([*COMMAND, "--num_nodes", "2"], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and "--node_rank" in done.stderr and "--meeting" in done.stderr
