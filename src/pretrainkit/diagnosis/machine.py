"""Who else uses the machine while a program runs on it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from pretrainkit.machine import read_gpus

IDLE_MIB = 1024
"""Memory that a driver takes on a GPU that nobody uses, with a margin."""


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Look at the machine before and after the block; what was seen is in the dict when the block has ended.

    GPUs whose memory others held before, and the share of the cores that others used meanwhile.
    """
    used = [gpu.index for gpu in read_gpus() if gpu.used_mib > IDLE_MIB]
    seen: dict[str, Any] = {"used_gpus": used, "cores": os.cpu_count() or 1}
    begin_s, begin_busy_s = time.monotonic(), _busy_s()
    try:
        yield seen
    finally:
        share = (_busy_s() - begin_busy_s) / ((time.monotonic() - begin_s) * seen["cores"])
        seen["cpu_used_by_others"] = max(0.0, min(1.0, share))


def _busy_s() -> float:
    """CPU seconds that all processes of the machine have used, but for this one and its children that have ended."""
    times = psutil.cpu_times()
    used = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    return used - sum(os.times()[:4])
