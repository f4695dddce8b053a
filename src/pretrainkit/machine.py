"""What this machine has, found out without importing torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MachineFacts:
    """What this machine has."""

    num_gpus: int
    """CUDA devices that this process may use and that the installed torch can drive."""
    num_cpus: int
    """Cores that this process may use."""
    torch_has_cuda: bool = True
    """Whether the installed torch was built for CUDA."""
    gpu_name: str | None = None
    """Of the first device, as its driver names it."""
    gpu_memory_gib: float | None = None


def read_machine(accelerator: str) -> MachineFacts:
    """Cores, CUDA devices and the kind of torch; the CUDA driver is left alone when `accelerator` is cpu."""
    has_cuda = torch_has_cuda()
    count_them = accelerator == "gpu" or (accelerator == "auto" and has_cuda)
    num_gpus = count_gpus() if count_them else 0
    name, memory_gib = describe_gpu() if num_gpus else (None, None)
    return MachineFacts(
        num_gpus=num_gpus,
        num_cpus=count_cpus(),
        torch_has_cuda=has_cuda,
        gpu_name=name,
        gpu_memory_gib=memory_gib,
    )


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


def describe_gpu() -> tuple[str | None, float | None]:
    """Name and memory in GiB of the first CUDA device, as its driver gives them; None for what it doesn't."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        device, memory, name = ctypes.c_int(0), ctypes.c_size_t(0), ctypes.create_string_buffer(256)
        if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
            return None, None
        named = driver.cuDeviceGetName(name, len(name), device) == 0
        measured = driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0
    except (OSError, AttributeError):
        return None, None
    return name.value.decode(errors="replace") if named else None, memory.value / 2**30 if measured else None


def torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build; builds for the CPU say so in their version."""
    return "+cpu" not in (installed_version("torch") or "")


def installed_version(package: str) -> str | None:
    """The version of an installed package; None when there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def available_memory_bytes(*, cgroups: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that this process can take without swapping, within every control group (cgroup v2) around it.

    Containers and schedulers limit a job's memory by control groups, which the kernel's available memory ignores.
    """
    available = int(psutil.virtual_memory().available)
    for group in _control_groups(cgroups, own):
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                used = int((group / "memory.current").read_text()) - _reclaimable(group)
                available = min(available, int(limit) - used)
        except (OSError, ValueError):
            continue
    return max(available, 0)


def _control_groups(cgroups: Path, own: Path) -> list[Path]:
    """The control group of this process and its parents."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return [cgroups]
    path = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), "")
    group = cgroups / path
    return [group, *(parent for parent in group.parents if parent.is_relative_to(cgroups))]


def _reclaimable(group: Path) -> int:
    """Cached file pages, which count as used and which the kernel drops when memory is short."""
    for line in (group / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
