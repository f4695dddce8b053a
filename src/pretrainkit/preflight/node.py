"""The preflight of one node: everything that can be checked before its ranks start."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pretrainkit import files
from pretrainkit.errors import PretrainkitError
from pretrainkit.jobs.registry import time_left
from pretrainkit.machine import (
    MIN_OPEN_FILES,
    SEMAPHORE_BYTES,
    count_gpus,
    process_limit,
    read_gpus,
    usable_shared_memory,
)
from pretrainkit.preflight import collectives, software
from pretrainkit.preflight.report import FAILED, OK, SKIPPED, WARNING, Check, Finding, NodeReport, check
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
SMALL_FILE_BYTES = 2**30
"""A limit of file sizes that leaves no space for checkpoints (assumed; a run computes what it needs itself)."""
ENOUGH_OPEN_FILES = 4096
"""Assumed: ranks, data loaders and a checkpoint of many files need about a thousand."""
MAX_CLOCK_SKEW_S = 5.0
"""Assumed: more makes file times and the logs of several nodes contradict each other."""
SCHEDULER_TIMEOUT_S = 20.0
"""Longest wait for the scheduler's word on the time left."""
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
    """Folder on the shared disk that the run writes to. If it isn't there yet, the nearest one above it is checked."""
    needed_bytes: int = 0
    """Free space that the run needs there."""
    needed_time_s: float = 0.0
    """Less time left than this is a failure: the time that saving takes."""
    constraints: Path | None = software.CONSTRAINTS
    """File of tested versions."""
    collectives: bool = True
    """Whether probe processes compute and all-reduce; without them a check takes about a second."""
    timeout_s: float = 120.0
    """Longest wait for the probe processes, and for the scheduler if that is less than SCHEDULER_TIMEOUT_S."""
    software: bool = False
    """Whether the engine is imported, and caches and foreign packages are looked at."""
    kept: Path | None = None
    """File of the packages that an image must keep as its base has them (name==version lines)."""


def check_node(request: NodeCheckRequest) -> NodeReport:
    """Check this node alone. A check that raises is a failure of the node, not an exception."""
    folder, timeout_s = nearest_folder(request.output_dir), request.timeout_s
    done = [check_gpus(request.ranks)] if request.accelerator == "gpu" else []
    lacks_gpus = any(one.is_failed for one in done)
    done += [
        check_disk(request.output_dir, request.needed_bytes, WRITE_BYTES if request.collectives else QUICK_WRITE_BYTES),
        check_clock(folder),
        check_limits(),
        software.check_packages(request.constraints),
        check_time(request.needed_time_s, min(timeout_s, SCHEDULER_TIMEOUT_S)),
    ]
    if request.kept:
        done.append(software.check_kept(request.kept))
    if request.software:
        done += [software.check_isolation(os.environ), software.check_caches(os.environ)]
        done.append(software.check_imports("cpu" if lacks_gpus else request.accelerator, timeout_s=timeout_s))
    if request.collectives and lacks_gpus:
        done.append(Check("all-reduce", SKIPPED, "not run with too few GPUs"))
    elif request.collectives:
        done += collectives.check_local(request.ranks, request.accelerator, timeout_s=timeout_s)
    return NodeReport(socket.gethostname(), tuple(done))


def nearest_folder(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: a check makes none."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


@check("gpus")
def check_gpus(ranks: int) -> Finding:
    """Whether the driver shows a GPU for every rank, each with free memory and without memory errors."""
    num_visible, gpus = count_gpus(), read_gpus()
    names = Counter(gpu.name for gpu in gpus)
    kinds = ", ".join(f"{count} x {name}" for name, count in names.items())
    found = f"{kinds}, driver {gpus[0].driver}" if gpus else f"{num_visible} GPUs"
    if num_visible < ranks:
        if len(gpus) > num_visible:
            found = f"CUDA finds {num_visible} of {len(gpus)} GPUs of the driver"
        return FAILED, f"{found}; {ranks} ranks need one each", "exclude the node, or ask for more GPUs"
    for gpu in gpus:
        if gpu.uncorrected_errors:
            errors = f"GPU {gpu.index} has {gpu.uncorrected_errors} uncorrected memory errors since its last reset"
            return FAILED, errors, "exclude the node and tell its administrators"
    busy = [gpu for gpu in gpus if gpu.used_mib > USED_SHARE * gpu.total_mib]
    if busy and len(gpus) - len(busy) < ranks:
        used = ", ".join(f"{gpu.index} ({gpu.used_mib} of {gpu.total_mib} MiB)" for gpu in busy)
        return FAILED, f"in use by others: GPU {used}", "end what uses them, or exclude the node"
    return OK, found


@check("disk")
def check_disk(folder: Path, needed_bytes: int, write_bytes: int) -> Finding:
    """Whether the output folder can be written and has space, and its write rate with a flush."""
    tried = nearest_folder(folder)
    try:
        free = shutil.disk_usage(tried).free
        rate = _write_rate(tried, min(write_bytes, free // 10))
    except OSError as error:
        return FAILED, f"{folder}: {error.strerror or error}", "mount it on this node, or free space"
    found = f"{format_bytes(free)} free, writes {format_bytes(rate)}/s"
    if free < needed_bytes:
        found = f"{format_bytes(free)} free in {folder}, {format_bytes(needed_bytes)} needed"
        return FAILED, found, "free space, or take another --experiments_dir"
    if tried != folder.absolute():
        return WARNING, f"no folder {folder} yet; in {tried}: {found}", "check its name, and that its disk is mounted"
    if rate < MIN_WRITE_RATE:
        return WARNING, found, "saving will take long: check the load and the striping of this disk"
    return OK, found


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


@check("clock")
def check_clock(folder: Path) -> Finding:
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
        return SKIPPED, f"{folder}: {error.strerror or error}"
    skew_s = statistics.median(skews)
    found = f"{abs(skew_s):.2f} s {'behind' if skew_s > 0 else 'ahead of'} the disk's"
    if abs(skew_s) > MAX_CLOCK_SKEW_S:
        return WARNING, found, "file times and logs will contradict each other: tell the administrators"
    return OK, found


@check("limits")
def check_limits() -> Finding:
    """Shared memory, open files and their size, which containers and login shells often make too small."""
    open_files, file_bytes = process_limit(resource.RLIMIT_NOFILE), process_limit(resource.RLIMIT_FSIZE)
    free = usable_shared_memory()
    files_word = "unlimited" if open_files is None else str(open_files)
    size_word = "" if file_bytes is None else f" of at most {format_bytes(file_bytes)}"
    found = f"{format_bytes(free)} of shared memory, {files_word} open files{size_word}"
    if free < MIN_SHARED_MEMORY:
        level = FAILED if free < SEMAPHORE_BYTES else WARNING  # without semaphores not even a checkpoint is saved
        return level, found, "give the container more shared memory (Docker: --ipc=host), or have /dev/shm mounted"
    if file_bytes is not None and file_bytes < SMALL_FILE_BYTES:
        return FAILED, found, "ulimit -f unlimited before the start: no checkpoint could be saved"
    if open_files is not None and open_files < ENOUGH_OPEN_FILES:
        level = FAILED if open_files < MIN_OPEN_FILES else WARNING
        return level, found, f"ulimit -n {ENOUGH_OPEN_FILES} before the start"
    return OK, found


@check("time left")
def check_time(needed_s: float, timeout_s: float) -> Finding:
    """Whether the scheduler leaves the job the time that saving takes."""
    try:
        left_s = time_left(os.environ, timeout_s)
    except PretrainkitError as error:
        return SKIPPED, f"unknown: {error.where}: {error.found}"
    if left_s is None:
        return SKIPPED, "no job with a time limit"
    found = f"{format_duration(max(left_s, 0))}"
    if left_s <= needed_s:
        action = "ask for more time, or lower --time_margin"
        return FAILED, f"{found}, {format_duration(needed_s)} needed to end in time", action
    return OK, found
