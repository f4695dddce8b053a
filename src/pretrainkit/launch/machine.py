"""What this machine has, found out without importing torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os

from pretrainkit.config.resolve import MachineFacts


def read_machine(accelerator: str) -> MachineFacts:
    """Cores, CUDA devices and the kind of torch; the CUDA driver is left alone when `accelerator` is cpu."""
    has_cuda = torch_has_cuda()
    count_them = accelerator == "gpu" or (accelerator == "auto" and has_cuda)
    return MachineFacts(num_gpus=count_gpus() if count_them else 0, num_cpus=count_cpus(), torch_has_cuda=has_cuda)


def count_cpus() -> int:
    """Cores that this process may run on (taskset, cgroup cpusets and schedulers narrow it)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_gpus() -> int:
    """CUDA devices that the driver shows to this process, CUDA_VISIBLE_DEVICES respected; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


def torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build; builds for the CPU say so in their version."""
    try:
        return "+cpu" not in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return True
