"""Probe processes: what may hang, crash or take a CUDA context runs in a process that can be killed.

A probe is a function that gets a `Probe`; the process writes its results to a file after each step, since a later step
may hang or crash. python -m pretrainkit.preflight.probe MODULE FUNCTION JSON runs one.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.errors import one_line

_EXIT_S = 20
"""Time that processes have to exit after their own timeout."""


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

    def report(self, **values: Any) -> None:
        """Add values to the results of this process, or replace those of the same name."""
        files.write_json(self.result_file, files.read_object(self.result_file) | values)


def run_probes(
    function: Callable[[Probe], None], accelerator: str, ranks: int, timeout_s: float, **of_all_nodes: Any
) -> tuple[list[dict[str, Any]], str]:
    """Run a probe in a process per rank, and wait.

    Args:
        function: public; its module is imported by the processes.
        of_all_nodes: further fields of Probe, where the ranks of several nodes meet.

    Returns:
        The results of each rank, in which 'error' says why some are missing; and NCCL's log.
    """
    with tempfile.TemporaryDirectory(prefix="check_node_") as folder:
        probes = [Probe(accelerator, rank, ranks, folder, timeout_s, **of_all_nodes) for rank in range(ranks)]
        processes = [_start(function, probe) for probe in probes]
        try:
            files.wait_until(lambda: None not in [one.poll() for one in processes], timeout_s=timeout_s + _EXIT_S)
        finally:
            hangs = [process.poll() is None for process in processes]
            for process in processes:
                process.kill()
            codes = [process.wait() for process in processes]
        results = [_result(probe, code, hung) for probe, code, hung in zip(probes, codes, hangs, strict=True)]
        logs = sorted(Path(folder).glob("nccl.*"))
        return results, "\n".join(path.read_text(errors="replace") for path in logs)


def _start(function: Callable[[Probe], None], probe: Probe) -> subprocess.Popen[bytes]:
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
    words = [function.__module__, function.__name__, json.dumps(asdict(probe))]
    command = [sys.executable, "-m", "pretrainkit.preflight.probe", *words]
    with probe.log_file.open("wb") as output:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)


def _result(probe: Probe, exit_code: int, hung: bool) -> dict[str, Any]:
    results = files.read_object(probe.result_file)
    if hung:
        results.setdefault("error", f"no answer within {probe.timeout_s:.0f} s")
    elif exit_code < 0:
        results.setdefault("error", f"killed by {signal.Signals(-exit_code).name}")
    elif exit_code > 0:
        lines = probe.log_file.read_text(errors="replace").strip().splitlines()
        results.setdefault("error", (lines or [f"exit code {exit_code}"])[-1])
    return results


def main() -> None:
    """Run one process of a probe."""
    module, function, values = sys.argv[1:]
    probe = Probe(**json.loads(values))
    try:
        getattr(importlib.import_module(module), function)(probe)
    except Exception as error:
        probe.report(error=one_line(error))
        os._exit(1)  # a communicator that has failed may hang while it is taken down
    os._exit(0)


if __name__ == "__main__":
    main()
