"""Trials of what ranks will do, in processes of their own: they can be killed, and the caller gets no CUDA context.

A process gets its Trial as JSON on the command line, and writes what it found after each step: a later one may hang or
crash.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files

_END_S = 20
"""Time that processes have to end by themselves after their own timeout."""
_POLL_S = 0.05


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


class Findings:
    """What a process of a trial has found so far, on disk after each step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._values: dict[str, Any] = {}

    def add(self, **values: Any) -> None:
        """Add values, or replace those of the same name."""
        self._values |= values
        files.write_json(self._path, self._values)


def run_trials(trials: list[Trial], module: str) -> list[dict[str, Any]]:
    """Start a process of `module` per trial, wait, and give what each found; 'error' says why something is missing."""
    folder = Path(trials[0].folder)
    processes = [_start(module, trial, folder / f"{trial.kind}_{trial.local_rank}.log") for trial in trials]
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


def _start(module: str, trial: Trial, log: Path) -> subprocess.Popen[bytes]:
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
            [sys.executable, "-m", module, trial.to_json()],
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
