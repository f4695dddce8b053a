"""What this machine has, found out without importing torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import resource
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
SEMAPHORE_BYTES = 256 * 2**10
"""What a rank takes of /dev/shm for semaphores, a page each, without data loaders' workers: about 30 (counted)."""


MIN_OPEN_FILES = 256
"""Of a rank: alone, on CPU, one trains and saves with 192 and fails with 128 (measured); peers and GPUs take more."""


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
    shared_memory_bytes: int | None = None
    """`usable_shared_memory`."""


def read_machine(accelerator: str) -> MachineFacts:
    """Cores, CUDA devices and the kind of torch; the CUDA driver is left alone when `accelerator` is cpu."""
    has_cuda = torch_has_cuda()
    num_gpus = count_gpus() if accelerator == "gpu" or (accelerator == "auto" and has_cuda) else 0
    name, memory_gib = describe_gpu() if num_gpus else (None, None)
    return MachineFacts(num_gpus, count_cpus(), has_cuda, name, memory_gib, usable_shared_memory())


def count_cpus() -> int:
    """Cores that this process may run on (taskset, cgroup cpusets and schedulers narrow it)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_limit(number: int) -> int | None:
    """The soft limit of this process, one of resource.RLIMIT_*; None: unlimited."""
    limit = resource.getrlimit(number)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def usable_shared_memory() -> int:
    """Bytes that this process can still share with others in /dev/shm; 0 where that is missing or can't be written.

    Semaphores of multiprocessing and tensors of data loaders are files there; neither has an alternative.
    """
    try:
        with tempfile.TemporaryFile(dir="/dev/shm"):
            return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0


def _cuda_driver() -> Any:
    """The CUDA driver's library, initialised; None without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        return driver if driver.cuInit(0) == 0 else None
    except (OSError, AttributeError):
        return None


def count_gpus() -> int:
    """CUDA devices that the driver shows to this process, CUDA_VISIBLE_DEVICES respected; 0 without a driver."""
    driver, count = _cuda_driver(), ctypes.c_int(0)
    return count.value if driver and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0


def describe_gpu() -> tuple[str | None, float | None]:
    """Name and memory in GiB of the first CUDA device, as its driver gives them; None for what it doesn't."""
    driver, device = _cuda_driver(), ctypes.c_int(0)
    memory, name = ctypes.c_size_t(0), ctypes.create_string_buffer(256)
    if not driver or driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None, None
    named = driver.cuDeviceGetName(name, len(name), device) == 0
    measured = driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device) == 0
    return name.value.decode(errors="replace") if named else None, memory.value / 2**30 if measured else None


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML reports it."""

    index: int
    """NVML's, which is that of nvidia-smi."""
    uuid: str
    name: str
    driver: str
    """Version of the driver."""
    total_mib: int
    used_mib: int
    uncorrected_errors: int
    """Uncorrected memory errors since the last reset; 0 where the GPU doesn't count them."""
    has_nvlink: bool
    """Whether at least one NVLink is up."""


def read_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, without a CUDA context; none without a driver or for MIG."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        gpus = [_read(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    return _visible(gpus)


def _read(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    uncorrected = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    try:
        errors = pynvml.nvmlDeviceGetTotalEccErrors(handle, *uncorrected)
    except pynvml.NVMLError:  # consumer GPUs have no ECC
        errors = 0
    try:
        has_nvlink = pynvml.nvmlDeviceGetNvLinkState(handle, 0) == pynvml.NVML_FEATURE_ENABLED
    except pynvml.NVMLError:
        has_nvlink = False
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        driver=pynvml.nvmlSystemGetDriverVersion(),
        total_mib=memory.total // 2**20,
        used_mib=memory.used // 2**20,
        uncorrected_errors=errors,
        has_nvlink=has_nvlink,
    )


def _visible(gpus: list[Gpu]) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES names, by index or the beginning of the UUID; all without it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if any(name.startswith("MIG") for name in names):
        return []
    return [gpu for name in names for gpu in gpus if str(gpu.index) == name or gpu.uuid.startswith(name)]


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
        with suppress(OSError, ValueError):  # a group without a limit says 'max'
            limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
            # Cached file pages count as used, and the kernel drops them when memory is short.
            cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
            available = min(available, limit - used + int(cached[1] if cached else 0))
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
