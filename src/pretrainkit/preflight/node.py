"""The preflight of one node: everything that can be checked before its ranks start."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pretrainkit import files
from pretrainkit.jobs.registry import time_left
from pretrainkit.machine import count_gpus
from pretrainkit.preflight import collectives, software
from pretrainkit.preflight.gpus import Gpu, read_gpus
from pretrainkit.preflight.report import FAILED, OK, SKIPPED, WARNING, Check, NodeReport, guarded
from pretrainkit.units import format_bytes, format_duration

WRITE_BYTES = 256 * 2**20
"""Bytes written to measure a disk."""
QUICK_WRITE_BYTES = 16 * 2**20
"""The same for a quick check, which only asks whether the disk can be written."""
WRITE_S = 2.0
"""Longest time of writing, without the flush."""
MIN_WRITE_RATE = 50 * 2**20
"""Bytes per second below which the check warns: 100 GB of checkpoint then take over half an hour."""
MIN_SHARED_MEMORY = 2**30
"""Bytes of /dev/shm below which NCCL and data loaders can fail (assumed; containers often get 64 MiB)."""
MIN_OPEN_FILES = 4096
"""Assumed: ranks, data loaders and a checkpoint of many files need about a thousand."""
MAX_CLOCK_SKEW_S = 5.0
"""Assumed: more makes file times and the logs of several nodes contradict each other."""
USED_SHARE = 0.1
"""Share of a GPU's memory above which another process must be using it (assumed; an idle driver takes 1%)."""


@dataclass(frozen=True)
class NodeCheckRequest:
    """What a node is checked for."""

    ranks: int
    """Ranks of this node."""
    accelerator: str
    """gpu (NCCL) or cpu (gloo)."""
    output_dir: Path
    """Folder on the shared disk that the run writes to."""
    needed_bytes: int = 0
    """Free space that the run needs there."""
    time_left_s: float | None = None
    """Seconds that the job may still take; None: the scheduler is asked."""
    needed_time_s: float = 0.0
    """Less time left than this is a failure: the time that saving takes."""
    constraints: Path | None = software.CONSTRAINTS
    """File of tested versions."""
    collectives: bool = True
    """Whether probe processes compute and all-reduce; without them a check takes about a second."""
    timeout_s: float = 120.0
    """Longest wait for the probe processes."""
    software: bool = False
    """Whether the engine is imported, and caches and foreign packages are looked at."""
    kept: Path | None = None
    """File of the packages that an image must keep as its base has them (name==version lines)."""


def check_node(request: NodeCheckRequest) -> NodeReport:
    """Check this node alone. A check that raises is a failure of the node, not an exception."""
    write_bytes = WRITE_BYTES if request.collectives else QUICK_WRITE_BYTES
    checks: dict[str, Callable[[], Check]] = {
        "disk": lambda: check_disk(request.output_dir, needed_bytes=request.needed_bytes, write_bytes=write_bytes),
        "clock": lambda: check_clock(request.output_dir),
        "limits": check_limits,
        "packages": lambda: software.check_packages(request.constraints),
        "time left": lambda: check_time(request.time_left_s, needed_s=request.needed_time_s),
    }
    if request.accelerator == "gpu":
        checks = {"gpus": lambda: check_gpus(request.ranks)} | checks
    if kept := request.kept:
        checks["image's own"] = lambda: software.check_kept(kept)
    if request.software:
        checks["isolation"] = lambda: software.check_isolation(os.environ)
        checks["caches"] = lambda: software.check_caches(os.environ)
    done = [guarded(name, check) for name, check in checks.items()]
    lacks_gpus = any(check.is_failed for check in done if check.name == "gpus")
    if request.software:
        done.append(software.check_imports("cpu" if lacks_gpus else request.accelerator, timeout_s=request.timeout_s))
    if request.collectives and lacks_gpus:
        done.append(Check("all-reduce", SKIPPED, "not run with too few GPUs"))
    elif request.collectives:
        done += collectives.check_local(request.ranks, request.accelerator, timeout_s=request.timeout_s)
    return NodeReport(socket.gethostname(), tuple(done))


def check_gpus(ranks: int) -> Check:
    """Whether the driver shows a GPU for every rank, each with free memory and without memory errors."""
    num_visible = count_gpus()
    gpus = read_gpus()
    found = _describe_gpus(gpus) if gpus else f"{num_visible} GPUs"
    if num_visible < ranks:
        if len(gpus) > num_visible:
            found = f"CUDA finds {num_visible} of {len(gpus)} GPUs of the driver"
        return Check("gpus", FAILED, f"{found}; {ranks} ranks need one each", "exclude the node, or ask for more GPUs")
    for gpu in gpus:
        if gpu.uncorrected_errors:
            errors = f"GPU {gpu.index} has {gpu.uncorrected_errors} uncorrected memory errors since its last reset"
            return Check("gpus", FAILED, errors, "exclude the node and tell its administrators")
    busy = [gpu for gpu in gpus if gpu.used_mib > USED_SHARE * gpu.total_mib]
    if busy and len(gpus) - len(busy) < ranks:
        used = ", ".join(f"{gpu.index} ({gpu.used_mib} of {gpu.total_mib} MiB)" for gpu in busy)
        return Check("gpus", FAILED, f"in use by others: GPU {used}", "end what uses them, or exclude the node")
    return Check("gpus", OK, found)


def _describe_gpus(gpus: list[Gpu]) -> str:
    names = [gpu.name for gpu in gpus]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{kinds}, driver {gpus[0].driver}"


def check_disk(folder: Path, *, needed_bytes: int, write_bytes: int = WRITE_BYTES) -> Check:
    """Whether the output folder can be written and has space, and its write rate with a flush."""
    name = "disk"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        rate = _write_rate(folder, min(write_bytes, free // 10))
    except OSError as error:
        return Check(name, FAILED, f"{folder}: {error.strerror or error}", "mount it on this node, or free space")
    found = f"{format_bytes(free)} free, writes {format_bytes(rate)}/s"
    if free < needed_bytes:
        found = f"{format_bytes(free)} free in {folder}, {format_bytes(needed_bytes)} needed"
        return Check(name, FAILED, found, "free space, or take another --experiments_dir")
    if rate < MIN_WRITE_RATE:
        return Check(name, WARNING, found, "saving will take long: check the load and the striping of this disk")
    return Check(name, OK, found)


def _write_rate(folder: Path, num_bytes: int) -> float:
    """Bytes per second of writing and flushing random data, read back and compared; raises OSError."""
    path = files.temporary_name(folder / ".write_test")
    block = os.urandom(min(8 * 2**20, max(num_bytes, 1)))
    begin_s, written = time.monotonic(), 0
    try:
        with path.open("wb") as file:
            while written < num_bytes and time.monotonic() - begin_s < WRITE_S:
                written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
        elapsed_s = time.monotonic() - begin_s
        with path.open("rb") as file:
            if file.read(len(block)) != block[:written]:
                raise OSError("what was written can't be read back")
    finally:
        path.unlink(missing_ok=True)
    return written / max(elapsed_s, 1e-9)


def check_clock(folder: Path) -> Check:
    """How far this node's clock is from that of the machine that keeps the output folder."""
    path = files.temporary_name(folder / ".clock_test")
    try:
        skews = []
        for _ in range(3):
            begin_s = time.time()
            path.write_bytes(b"x")
            skews.append(path.stat().st_mtime - (begin_s + time.time()) / 2)
            path.unlink()
    except OSError as error:
        return Check("clock", SKIPPED, f"{folder}: {error.strerror or error}")
    skew_s = statistics.median(skews)
    found = f"{abs(skew_s):.2f} s {'behind' if skew_s > 0 else 'ahead of'} the disk's"
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        return Check("clock", WARNING, found, "file times and logs will contradict each other: tell the administrators")
    return Check("clock", OK, found)


def check_limits() -> Check:
    """Shared memory and open files, which containers and login shells often make too small."""
    shared = Path("/dev/shm")
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    free = shutil.disk_usage(shared).free if shared.is_dir() else 0
    files_word = "unlimited" if open_files == resource.RLIM_INFINITY else str(open_files)
    found = f"{format_bytes(free)} of shared memory, {files_word} open files"
    if free < MIN_SHARED_MEMORY:
        return Check("limits", WARNING, found, "give the container more shared memory (Docker: --ipc=host)")
    if open_files != resource.RLIM_INFINITY and open_files < MIN_OPEN_FILES:
        return Check("limits", WARNING, found, f"ulimit -n {MIN_OPEN_FILES} before the start")
    return Check("limits", OK, found)


def check_time(left_s: float | None, *, needed_s: float, environment: Mapping[str, str] = os.environ) -> Check:
    """Whether the job has time left to do something with; asks the scheduler when `left_s` is None."""
    left_s = time_left(environment) if left_s is None else left_s
    if left_s is None:
        return Check("time left", SKIPPED, "no job with a time limit")
    found = f"{format_duration(max(left_s, 0))}"
    if left_s <= needed_s:
        action = "ask for more time, or lower --time_margin"
        return Check("time left", FAILED, f"{found}, {format_duration(needed_s)} needed to end in time", action)
    return Check("time left", OK, found)
