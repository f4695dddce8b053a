"""What a node says about itself within a second, without torch: GPUs, driver, disk, memory, clock, packages, time."""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.jobs.registry import time_left
from pretrainkit.machine import count_gpus, installed_version
from pretrainkit.units import format_bytes, format_duration

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
"""The tested versions, where the package runs from a checkout."""
WRITE_BYTES = 256 * 2**20
"""Most that is written to measure a disk."""
QUICK_WRITE_BYTES = 16 * 2**20
"""The same for a quick check, which is about whether it can be written at all."""
WRITE_S = 2.0
"""Longest time of writing; flushing comes on top."""
SLOW_WRITE = 50 * 2**20
"""Bytes per second below which a warning is given: 100 GB of checkpoint then take over half an hour."""
SMALL_SHARED_MEMORY = 2**30
"""Bytes of /dev/shm below which NCCL and data loaders can fail (assumed; containers often get 64 MiB)."""
FEW_OPEN_FILES = 4096
"""Assumed: ranks, data loaders and a checkpoint of many files need about a thousand."""
MAX_CLOCK_SKEW_S = 5.0
"""Assumed: more makes file times and the logs of several nodes contradict each other."""
_ENGINE = ("torch", "nemo-toolkit", "megatron-core", "lightning", "transformers")
_READING = ("tokenizers", "numpy", "omegaconf", "psutil", "safetensors")
ENGINE = {*_ENGINE, *_READING}
"""Packages without which no rank gets far; of the others an image may lack some that a run doesn't use."""
USED_SHARE = 0.1
"""Share of a GPU's memory above which somebody else must be using it (assumed; an idle driver takes 1%)."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: str
    """ok, warning, failed or skipped."""
    found: str
    action: str = ""
    """What to do about it."""

    @property
    def is_failed(self) -> bool:
        """Whether no rank should be started."""
        return self.status == FAILED

    def describe(self) -> str:
        """A line of a table, and one more with what to do."""
        line = f"  {self.name:<12}{self.status:<9}{self.found}"
        return f"{line}\n{'':<23}what to do: {self.action}" if self.action else line


def check_gpus(ranks: int) -> Check:
    """Whether the driver shows a GPU for every rank, each with free memory and without memory errors."""
    visible = count_gpus()
    gpus = visible_gpus()
    what = _gpu_words(gpus) if gpus else f"{visible} GPUs"
    if visible < ranks:
        needed = f"{what}; {ranks} ranks need one each"
        if len(gpus) > visible:
            needed = f"CUDA finds {visible} of {len(gpus)} GPUs of the driver; {ranks} ranks need one each"
        return Check("gpus", FAILED, needed, "exclude the node, or ask for more GPUs")
    for gpu in gpus:
        if gpu["errors"]:
            found = f"GPU {gpu['index']} has {gpu['errors']} uncorrected memory errors since its last reset"
            return Check("gpus", FAILED, found, "exclude the node and tell its administrators")
    busy = [gpu for gpu in gpus if gpu["used"] > USED_SHARE * gpu["total"]]
    if busy and len(gpus) - len(busy) < ranks:
        used = ", ".join(f"{gpu['index']} ({gpu['used']} of {gpu['total']} MiB)" for gpu in busy)
        return Check("gpus", FAILED, f"in use by others: GPU {used}", "end what uses them, or exclude the node")
    return Check("gpus", OK, what)


def visible_gpus() -> list[dict[str, Any]]:
    """What nvidia-smi says of the GPUs that CUDA_VISIBLE_DEVICES leaves visible; empty without nvidia-smi."""
    return _visible_gpus(_query_gpus())


def _query_gpus() -> list[dict[str, Any]]:
    """What nvidia-smi says of all GPUs: index, uuid, name, driver, MiB total and used, errors; empty without it."""
    fields = "index,uuid,name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    gpus = []
    for line in done.stdout.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 7:
            numbers = [int(word) if word.isdigit() else 0 for word in words[4:]]
            names = dict(zip(("index", "uuid", "name", "driver"), words, strict=False))
            gpus.append(names | dict(zip(("total", "used", "errors"), numbers, strict=True)))
    return gpus


def _visible_gpus(gpus: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that CUDA_VISIBLE_DEVICES names, by index or the beginning of the UUID; all without it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if any(name.startswith("MIG") for name in names):
        return []
    chosen = [gpu for name in names for gpu in gpus if gpu["index"] == name or gpu["uuid"].startswith(name)]
    return chosen


def _gpu_words(gpus: list[dict[str, Any]]) -> str:
    names = [gpu["name"] for gpu in gpus]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{kinds}, driver {gpus[0]['driver']}"


def check_disk(folder: Path, *, needed_bytes: int, write_bytes: int = WRITE_BYTES) -> Check:
    """Whether the output folder can be written, has room, and how fast it takes what is flushed to it."""
    name = "disk"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        rate = _write_rate(folder, min(write_bytes, free // 10))
    except OSError as error:
        return Check(name, FAILED, f"{folder}: {error.strerror or error}", "mount it on this node, or free space")
    found = f"{format_bytes(free)} free, takes {format_bytes(rate)}/s"
    if free < needed_bytes:
        found = f"{format_bytes(free)} free in {folder}, {format_bytes(needed_bytes)} needed"
        return Check(name, FAILED, found, "free space, or take another --experiments_dir")
    if rate < SLOW_WRITE:
        return Check(name, WARNING, found, "saving will take long: look at the load and the striping of this disk")
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
    if free < SMALL_SHARED_MEMORY:
        return Check("limits", WARNING, found, "give the container more shared memory (Docker: --ipc=host)")
    if open_files != resource.RLIM_INFINITY and open_files < FEW_OPEN_FILES:
        return Check("limits", WARNING, found, f"ulimit -n {FEW_OPEN_FILES} before the start")
    return Check("limits", OK, found)


def check_packages(constraints: Path | None) -> Check:
    """Installed packages that this project needs, against the versions it is tested with."""
    needed = needed_packages()
    installed = {name: installed_version(name) for name in needed}
    missing = sorted(name for name, version in installed.items() if version is None)
    if missing:
        found = f"not installed: {', '.join(missing)}"
        action = "install what the run uses: pip install -c constraints.txt, with --no-deps in an image that works"
        return Check("packages", FAILED if ENGINE & set(missing) else WARNING, found, action)
    if constraints is None or not constraints.is_file():
        return Check("packages", SKIPPED, f"{len(needed)} installed; no constraints.txt to compare with")
    tested = read_constraints(constraints.read_text(encoding="utf-8"))
    different = [
        f"{name} {installed[name]} (tested: {', '.join(sorted(tested[name]))})"
        for name in needed
        if name in tested and not {str(installed[name]), str(installed[name]).partition("+")[0]} & tested[name]
    ]
    if different:
        action = "fine in an image that works; else install with -c constraints.txt"
        return Check("packages", WARNING, f"{len(different)} of {len(needed)} differ: {'; '.join(different)}", action)
    return Check("packages", OK, f"{len(needed)}, as in {constraints.name}")


def read_constraints(text: str) -> dict[str, set[str]]:
    """Package -> tested versions (several where they depend on Python's), names normalised."""
    tested: dict[str, set[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"\s*([A-Za-z0-9._-]+)==([^\s;#]+)", line):
            tested.setdefault(_normal(match[1]), set()).add(match[2])
    return tested


def needed_packages() -> list[str]:
    """Names of the packages that this one requires; none when it runs without being installed."""
    try:
        requirements = importlib.metadata.requires("pretrainkit") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    names = [re.match(r"[A-Za-z0-9._-]+", text) for text in requirements if "extra ==" not in text]
    return sorted(_normal(match[0]) for match in names if match)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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
