"""Tries out what ranks will do together: compute, and all-reduce within a node and over all nodes.

The trial is done by processes of its own (`collectives_rank`), which can be killed when they hang, and which leave no
CUDA context behind in the caller.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pretrainkit.launch.node_probes import FAILED, OK, SKIPPED, WARNING, Check
from pretrainkit.units import format_bytes

RANK_MODULE = "pretrainkit.launch.collectives_rank"
SLOW_SHARE = 0.8
"""Share of the median speed of a node's GPUs below which one is called slow (assumed; equal GPUs differ by 3%)."""
_END_S = 20
"""Time that processes have to end by themselves after their own timeout."""
_POLL_S = 0.05
_CLUSTER_ADVICE = "exclude the node, or run with NCCL_DEBUG=INFO and show the log to the administrators"


@dataclass(frozen=True)
class Trial:
    """What one process of a trial has to do; passed to it as JSON."""

    kind: str
    """local: compute and all-reduce within the node; world: over all nodes; even, odd: in pairs of nodes."""
    accelerator: str
    local_rank: int
    ranks_per_node: int
    folder: str
    """For results, and for the store of a local trial."""
    timeout_s: float
    node: int = 0
    num_nodes: int = 1
    address: str = ""
    port: int = 0

    @property
    def result_file(self) -> Path:
        """Where the process writes what it found."""
        return Path(self.folder) / f"{self.kind}_{self.local_rank}.json"

    def to_json(self) -> str:
        """The text for the command line."""
        return json.dumps(asdict(self))


def check_local(ranks: int, accelerator: str, *, timeout_s: float) -> list[Check]:
    """Checks 'compute' (GPUs only) and 'all-reduce' of one node."""
    if accelerator == "cpu" and ranks == 1:
        return [Check("all-reduce", SKIPPED, "one rank")]
    with tempfile.TemporaryDirectory(prefix="check_node_") as folder:
        first = Trial("local", accelerator, 0, ranks, folder, timeout_s)
        results = _run([replace(first, local_rank=rank) for rank in range(ranks)])
        checks = [_compute(results)] if accelerator == "gpu" else []
        return [*checks, _all_reduce(results, accelerator, _nccl_transport(Path(folder)))]


def check_world(
    ranks: int, accelerator: str, *, address: str, port: int, node: int, hosts: Sequence[str], timeout_s: float
) -> Check:
    """The check 'network' over all nodes, the same on each of them."""
    with tempfile.TemporaryDirectory(prefix="check_node_") as folder:
        first = Trial("world", accelerator, 0, ranks, folder, timeout_s, node, len(hosts), address, port)
        result = _run([replace(first, local_rank=rank) for rank in range(ranks)])[0]
        if result.get("bad_nodes") == []:
            speed = f", {format_bytes(result['num_bytes'])} at {format_bytes(result['bytes_per_s'])}/s"
            over = _nccl_transport(Path(folder)) or accelerator_word(accelerator)
            return Check("network", OK, f"{ranks * len(hosts)} ranks on {len(hosts)} nodes over {over}{speed}")
        for kind in ("even", "odd"):
            result = _run([replace(first, kind=kind)])[0]
    return _network_failure(result, hosts)


def accelerator_word(accelerator: str) -> str:
    """The library that ranks talk through."""
    return "NCCL" if accelerator == "gpu" else "gloo"


def _network_failure(result: dict[str, Any], hosts: Sequence[str]) -> Check:
    def names(nodes: Sequence[int]) -> str:
        return ", ".join(f"{node} ({hosts[node]})" for node in nodes)

    action = _CLUSTER_ADVICE
    if "bad_nodes" not in result:
        return Check("network", FAILED, f"no answer from node {names([0])}: {result['error']}", action)
    if bad := result["bad_nodes"]:
        return Check("network", FAILED, f"node {names(bad)} can't be reached by the others", action)
    if pairs := result["bad_pairs"]:
        words = "; ".join(" and ".join(names([node]) for node in pair) for pair in pairs)
        return Check("network", FAILED, f"nodes that don't reach each other: {words}", action)
    return Check("network", FAILED, "the all-reduce over all nodes failed, though pairs of nodes work", action)


def _compute(results: list[dict[str, Any]]) -> Check:
    """Whether each GPU computes rightly, and as fast as its neighbours."""
    action = "exclude the node and tell its administrators"
    failed = [
        f"GPU {rank}: {_reason(result, 'tflops')}" for rank, result in enumerate(results) if "tflops" not in result
    ]
    if failed:
        return Check("compute", FAILED, "; ".join(failed), action)
    speeds = [float(result["tflops"]) for result in results]
    usual = statistics.median(speeds)
    found = f"{min(speeds):.0f} to {max(speeds):.0f} TFLOP/s, bf16 matrix product"
    slow = [f"GPU {rank} ({speed:.0f})" for rank, speed in enumerate(speeds) if speed < SLOW_SHARE * usual]
    if slow:
        return Check("compute", WARNING, f"slower than the others: {', '.join(slow)}; {found}", action)
    return Check("compute", OK, found)


def _all_reduce(results: list[dict[str, Any]], accelerator: str, transport: str) -> Check:
    failed = [
        f"rank {rank}: {_reason(result, 'bytes_per_s')}"
        for rank, result in enumerate(results)
        if "bytes_per_s" not in result
    ]
    if failed:
        return Check("all-reduce", FAILED, "; ".join(failed), _CLUSTER_ADVICE)
    first = results[0]
    library = f"NCCL {first['nccl']}" if accelerator == "gpu" else "gloo"
    ranks = f"{len(results)} rank{'s' if len(results) > 1 else ''} over {library}"
    if len(results) == 1:
        return Check("all-reduce", OK, ranks)
    speed = min(float(result["bytes_per_s"]) for result in results)
    found = (
        f"{ranks}{f', {transport}' if transport else ''}, {format_bytes(first['num_bytes'])} at {format_bytes(speed)}/s"
    )
    return Check("all-reduce", OK, found)


def _reason(result: dict[str, Any], wanted: str) -> str:
    return str(result.get("error", f"ended before it gave {wanted}"))


def _nccl_transport(folder: Path) -> str:
    """Through what NCCL's channels go (P2P/CUMEM, SHM, NET/IB, ...), from its own log."""
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*")))
    channels = sorted(
        set(re.findall(r"\bvia ((?:P2P|SHM|NET)[\w/]*?)(?:/\d+.*|/read|/direct.*|)\s*$", text, re.MULTILINE))
    )
    networks = sorted(set(re.findall(r"Using network (\w+)", text)))
    words = channels + ([f"network {', '.join(networks)}"] if networks else [])
    return ", ".join(words)


def _run(trials: list[Trial]) -> list[dict[str, Any]]:
    """Start a process per trial, wait, and give what each found; 'error' says why something is missing."""
    folder = Path(trials[0].folder)
    processes = [_start(trial, folder / f"{trial.kind}_{trial.local_rank}.log") for trial in trials]
    end_s = time.monotonic() + trials[0].timeout_s + _END_S
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end_s:
            time.sleep(_POLL_S)
    finally:
        hanging = [process.poll() is None for process in processes]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
    return [
        _result(trial, process.returncode, hangs)
        for trial, process, hangs in zip(trials, processes, hanging, strict=True)
    ]


def _start(trial: Trial, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("NCCL_DEBUG", "TORCHELASTIC"))
    }
    environment |= {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT",
        "NCCL_DEBUG_FILE": f"{trial.folder}/nccl.%h.%p",
        # A collective that waits too long raises instead of hanging.
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", RANK_MODULE, trial.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )


def _result(trial: Trial, exit_code: int, hangs: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if trial.result_file.is_file():
        found = json.loads(trial.result_file.read_text(encoding="utf-8"))
    if hangs:
        found.setdefault("error", f"no answer within {trial.timeout_s:.0f} s")
    elif exit_code < 0:
        found.setdefault("error", f"killed by {signal.Signals(-exit_code).name}")
    elif exit_code > 0:
        log = (Path(trial.folder) / f"{trial.kind}_{trial.local_rank}.log").read_text(errors="replace")
        found.setdefault("error", (log.strip().splitlines() or [f"exit code {exit_code}"])[-1])
    return found
