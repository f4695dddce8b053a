"""Probe processes: what may hang, crash or take a CUDA context runs in a process that can be killed.

A probe is a module that is started as `python -m MODULE JSON`, with a `Probe` as JSON. It writes its results to a file
after each step, since a later step may hang or crash.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files

_EXIT_S = 20
"""Time that processes have to exit after their own timeout."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Probe:
    """What one probe process has to do."""

    accelerator: str
    """gpu or cpu."""
    local_rank: int
    ranks_per_node: int
    folder: str
    """Temporary folder of the node, for results, logs and the store of the node's ranks."""
    timeout_s: float
    node: int = 0
    num_nodes: int = 1
    address: str = ""
    """Host of the store that all nodes connect to; empty for a probe of one node."""
    port: int = 0

    @property
    def result_file(self) -> Path:
        """Where the process writes its results."""
        return Path(self.folder) / f"rank_{self.local_rank}.json"

    @property
    def log_file(self) -> Path:
        """Where its output goes."""
        return Path(self.folder) / f"rank_{self.local_rank}.log"

    @classmethod
    def from_command_line(cls) -> Probe:
        """The probe that this process is to run."""
        return cls(**json.loads(sys.argv[1]))

    @property
    def results(self) -> dict[str, Any]:
        """What the process has reported so far."""
        return files.read_json(self.result_file) if self.result_file.is_file() else {}

    def report(self, **values: Any) -> None:
        """Add values to the results of this process, or replace those of the same name."""
        files.write_json(self.result_file, self.results | values)


def run_probes(probes: list[Probe], module: str) -> list[dict[str, Any]]:
    """Start a process per probe and wait; gives the results of each. 'error' says why some are missing."""
    processes = [_start(module, probe) for probe in probes]
    try:
        timeout_s = probes[0].timeout_s + _EXIT_S
        files.wait_until(
            lambda: all(process.poll() is not None for process in processes), timeout_s=timeout_s, poll_s=_POLL_S
        )
    finally:
        hangs = [process.poll() is None for process in processes]
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
    return [_result(probe, code, hung) for probe, code, hung in zip(probes, codes, hangs, strict=True)]


def _start(module: str, probe: Probe) -> subprocess.Popen[bytes]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("NCCL_DEBUG", "TORCHELASTIC"))
    }
    environment |= {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT",
        "NCCL_DEBUG_FILE": f"{probe.folder}/nccl.%h.%p",
        # A collective that waits too long raises instead of hanging.
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", module, json.dumps(asdict(probe))]
    with probe.log_file.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)


def _result(probe: Probe, exit_code: int, hung: bool) -> dict[str, Any]:
    results = probe.results
    if hung:
        results.setdefault("error", f"no answer within {probe.timeout_s:.0f} s")
    elif exit_code < 0:
        results.setdefault("error", f"killed by {signal.Signals(-exit_code).name}")
    elif exit_code > 0:
        lines = probe.log_file.read_text(errors="replace").strip().splitlines()
        results.setdefault("error", (lines or [f"exit code {exit_code}"])[-1])
    return results
