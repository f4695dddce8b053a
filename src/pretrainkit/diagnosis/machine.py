"""The machine while a program runs on it: clocks and load of the GPUs, and who else uses it. Only read, never set."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

GPU_FIELDS = (
    *("index", "name", "clocks.sm", "clocks.max.sm", "utilization.gpu", "memory.used", "memory.total"),
    *("power.draw", "power.limit", "temperature.gpu", "pcie.link.width.current", "pcie.link.width.max"),
)
POLL_S = 1.0
BUSY = 50.0
"""Per cent of GPU use from which on a sample counts as 'at work': clocks fall when there is nothing to do."""


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Poll the machine while the block runs; what was seen is in the dict that it gives when the block has ended.

    Per GPU it holds the clocks at work, processes of others, and the share of the CPUs that others used.
    """
    ended, samples, seen = threading.Event(), list[dict[str, Any]](), dict[str, Any]()

    def poll() -> None:
        while not ended.wait(POLL_S):
            samples.extend(_query_gpus())

    thread = threading.Thread(target=poll, name="machine watch", daemon=True)
    others, cores = other_gpu_processes(), os.cpu_count() or 1
    begin_s, begin_busy_s = time.monotonic(), _busy_s()
    if shutil.which("nvidia-smi"):
        thread.start()
    try:
        yield seen
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()
        share = (_busy_s() - begin_busy_s) / ((time.monotonic() - begin_s) * cores)
        indexes = dict.fromkeys(sample["index"] for sample in samples)
        seen |= {
            "cores": cores,
            "cpu_used_by_others": max(0.0, min(1.0, share)),
            "gpus": [_gpu([item for item in samples if item["index"] == index]) for index in indexes],
            "gpu_processes_of_others": others,
        }


def _gpu(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One GPU's clock at work, and its extremes."""
    clocks = [_number(item["clocks.sm"]) for item in samples if _number(item["utilization.gpu"]) >= BUSY]
    return {
        "index": samples[0]["index"],
        "name": samples[0]["name"],
        "samples_at_work": len(clocks),
        "clock_mhz": sum(clocks) / len(clocks) if clocks else None,
        "highest_clock_mhz": _number(samples[0]["clocks.max.sm"]),
        "power_w": max(_number(item["power.draw"]) for item in samples),
        "power_limit_w": _number(samples[0]["power.limit"]),
        "temperature_c": max(_number(item["temperature.gpu"]) for item in samples),
        "memory_used_mib": max(_number(item["memory.used"]) for item in samples),
    }


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
    """CPU seconds that all processes of the machine have used, but for this one and its children that have ended."""
    times = psutil.cpu_times()
    used = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    return used - sum(os.times()[:4])
