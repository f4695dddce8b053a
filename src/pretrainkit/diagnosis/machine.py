"""The machine while a program runs on it: clocks and load of the GPUs, and who else uses it. Only read, never set."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from itertools import chain
from typing import Any

import psutil

GPU_FIELDS = (
    *("index", "name", "clocks.sm", "clocks.max.sm", "utilization.gpu", "memory.used", "memory.total"),
    *("power.draw", "power.limit", "temperature.gpu", "pcie.link.width.current", "pcie.link.width.max"),
)
POLL_S = 1.0
BUSY = 50.0
"""Per cent of GPU use from which on a sample counts as 'at work': clocks fall when there is nothing to do."""


class Watch:
    """Polls the machine for as long as the block lasts."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._gpu_samples: list[list[dict[str, Any]]] = []
        self._thread = threading.Thread(target=self._poll, name="machine watch", daemon=True)

    def __enter__(self) -> Watch:
        self._begin_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), _own_s()
        self._others = other_gpu_processes()
        if shutil.which("nvidia-smi"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._end_s, self._end_busy_s, self._end_own_s = time.monotonic(), _busy_s(), _own_s()

    def _poll(self) -> None:
        while not self._ended.wait(POLL_S):
            self._gpu_samples.append(_query_gpus())

    def result(self) -> dict[str, Any]:
        """What was seen: per GPU the clocks at work, other processes; of the CPUs the share that others used."""
        elapsed_s = self._end_s - self._begin_s
        cores = os.cpu_count() or 1
        busy_s = self._end_busy_s - self._busy_s - (self._end_own_s - self._own_s)
        return {
            "cores": cores,
            "cpu_used_by_others": max(0.0, min(1.0, busy_s / (elapsed_s * cores))),
            "gpus": self._gpus(),
            "gpu_processes_of_others": self._others,
        }

    def _gpus(self) -> list[dict[str, Any]]:
        by_index = defaultdict(list)
        for sample in chain.from_iterable(self._gpu_samples):
            by_index[sample["index"]].append(sample)
        found = []
        for samples in by_index.values():
            at_work = [item for item in samples if _number(item["utilization.gpu"]) >= BUSY]
            clocks = [_number(item["clocks.sm"]) for item in at_work]
            found.append(
                {
                    "index": samples[0]["index"],
                    "name": samples[0]["name"],
                    "samples_at_work": len(at_work),
                    "clock_mhz": sum(clocks) / len(clocks) if clocks else None,
                    "highest_clock_mhz": _number(samples[0]["clocks.max.sm"]),
                    "power_w": max((_number(item["power.draw"]) for item in samples), default=None),
                    "power_limit_w": _number(samples[0]["power.limit"]),
                    "temperature_c": max(_number(item["temperature.gpu"]) for item in samples),
                    "memory_used_mib": max(_number(item["memory.used"]) for item in samples),
                }
            )
        return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # [N/A]
        return 0.0


def _nvidia_smi(*arguments: str) -> list[list[str]]:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
        done.check_returncode()
    except (OSError, subprocess.SubprocessError):
        return []
    return [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _query_gpus() -> list[dict[str, Any]]:
    rows = _nvidia_smi(f"--query-gpu={','.join(GPU_FIELDS)}")
    return [dict(zip(GPU_FIELDS, row, strict=True)) for row in rows if len(row) == len(GPU_FIELDS)]


def other_gpu_processes() -> list[dict[str, str]]:
    """Processes that compute on this machine's GPUs now, before the program is started."""
    rows = _nvidia_smi("--query-compute-apps=pid,process_name,used_gpu_memory")
    return [dict(zip(("pid", "name", "memory_mib"), row, strict=False)) for row in rows]


def _busy_s() -> float:
    """CPU seconds that all processes of the machine have used."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def _own_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])
