"""The GPUs of this node as NVML reports them: no torch, no CUDA context."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

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
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible; empty without a driver, and for MIG devices."""
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
