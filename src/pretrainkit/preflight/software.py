"""The software of a node or image: package versions, imports that work, writable caches, nothing foreign."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import site
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pretrainkit.errors import one_line
from pretrainkit.files import nearest_existing
from pretrainkit.jobs.scripts import HOME_CACHES
from pretrainkit.machine import installed_version
from pretrainkit.preflight.probe import Probe, run_probes
from pretrainkit.preflight.report import FAILED, OK, SKIPPED, WARNING, Finding, check
from pretrainkit.units import format_bytes

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
"""The tested versions, where the package runs from a checkout."""
_ENGINE = ("torch", "nemo-toolkit", "megatron-core", "lightning", "transformers")
_READING = ("tokenizers", "numpy", "omegaconf", "psutil", "safetensors")
ENGINE = {*_ENGINE, *_READING}
"""Packages without which no rank gets far; of the others an image may lack some that a run doesn't use."""
MIN_HOME_BYTES = 50 * 10**9
"""Bytes free in a home below which caches don't belong there (assumed; the weights of an 8B model take 16 GB)."""
_NO_DRIVER = re.compile(r"libcuda|libnvidia|NVIDIA driver|CUDA driver|No CUDA GPUs|CUDA-capable", re.IGNORECASE)
REQUIRED = (
    "numpy",
    "torch",
    "transformers",
    "tokenizers",
    "lightning.pytorch",
    "megatron.core",
    "nemo.collections.llm",
)
"""Modules without which no run starts, in the order in which their failures are best understood."""
OPTIONAL = ("triton", "liger_kernel", "transformer_engine.pytorch", "flash_attn")
"""Modules that make it fast; those that are installed must work."""


@check("packages")
def check_packages(constraints: Path | None) -> Finding:
    """Installed packages that this project needs, against the versions it is tested with."""
    needed = needed_packages()
    installed = {name: installed_version(name) for name in needed}
    missing = sorted(name for name, version in installed.items() if version is None)
    if missing:
        found = f"not installed: {', '.join(missing)}"
        action = "install what the run uses: pip install -c constraints.txt, with --no-deps in an image that works"
        return FAILED if ENGINE & set(missing) else WARNING, found, action
    if constraints is None or not constraints.is_file():
        return SKIPPED, f"{len(needed)} installed; no constraints.txt to compare with"
    tested = read_constraints(constraints.read_text(encoding="utf-8"))
    different = [
        f"{name} {installed[name]} (tested: {', '.join(sorted(tested[name]))})"
        for name in needed
        if name in tested and not {str(installed[name]), str(installed[name]).partition("+")[0]} & tested[name]
    ]
    if different:
        action = "fine in an image that works; else install with -c constraints.txt"
        return WARNING, f"{len(different)} of {len(needed)} differ: {'; '.join(different)}", action
    return OK, f"{len(needed)}, as in {constraints.name}"


def read_constraints(text: str) -> dict[str, set[str]]:
    """Package -> tested versions (several where they depend on Python's), names normalised."""
    tested: dict[str, set[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"\s*([A-Za-z0-9._-]+)==([^\s;#]+)", line):
            tested.setdefault(canonicalize_name(match[1]), set()).add(match[2])
    return tested


def needed_packages() -> list[str]:
    """Names of the packages that this one requires on this Python; none when it runs without being installed."""
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("pretrainkit") or []]
    except importlib.metadata.PackageNotFoundError:
        return []
    return sorted(
        canonicalize_name(one.name) for one in requirements if not one.marker or one.marker.evaluate({"extra": ""})
    )


@check("image's own")
def check_kept(path: Path) -> Finding:
    """Whether the packages that an image must keep (name==version lines) are still those it came with."""
    lines = [line.partition("==") for line in path.read_text(encoding="utf-8").split()]
    found = {name: (version, installed_version(name)) for name, _, version in lines}
    changed = [f"{name} {was} -> {now or 'none'}" for name, (was, now) in found.items() if was != now]
    if changed:
        action = "build the image again; torch and its kin are compiled for each other"
        return FAILED, f"replaced: {', '.join(changed)}", action
    return OK, f"{len(found)} packages of the base image, untouched" if found else "none"


@check("isolation")
def check_isolation(environment: Mapping[str, str]) -> Finding:
    """Whether packages of the home, or of PYTHONPATH, shadow the installed ones that this project needs."""
    needed = ENGINE | set(needed_packages())
    user_site = Path(site.getusersitepackages())
    in_home = _distributions(user_site) if site.ENABLE_USER_SITE else set()
    if in_the_way := sorted(in_home & needed):
        found = f"{user_site} shadows: {', '.join(in_the_way)}"
        return FAILED, found, "export PYTHONNOUSERSITE=1, and leave the home outside (--no-home)"
    paths = [Path(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    for path in paths:
        if in_the_way := sorted(_distributions(path) & needed):
            found = f"PYTHONPATH: {path} shadows: {', '.join(in_the_way)}"
            return WARNING, found, "unset PYTHONPATH, unless it is meant"
    return OK, "packages of the home stay out" if not site.ENABLE_USER_SITE else "no packages in the home"


def _distributions(folder: Path) -> set[str]:
    """Names of the packages that are installed in a folder."""
    return {
        canonicalize_name(path.name.partition("-")[0])
        for pattern in ("*.dist-info", "*.egg-info")
        for path in folder.glob(pattern)
    }


@check("caches")
def check_caches(environment: Mapping[str, str]) -> Finding:
    """Whether the hub's, Triton's and W&B's caches can be written, and don't fill a small home."""
    home = Path(environment.get("HOME") or "/nonexistent")
    base = Path(environment["XDG_CACHE_HOME"]) if environment.get("XDG_CACHE_HOME") else None
    folders = {}
    for variable, default in HOME_CACHES.items():
        in_base = base / Path(default).name if base and default.startswith(".cache/") else home / default
        folders[variable] = Path(environment[variable]) if environment.get(variable) else in_base
    action = "set cache_dir in the site's file, or the variables, to a folder on a group disk"
    if closed := [f"{variable} ({folder})" for variable, folder in folders.items() if not _is_writable(folder)]:
        return FAILED, f"can't be written: {', '.join(closed)}", action
    in_home = [variable for variable, folder in folders.items() if folder.is_relative_to(home)]
    if in_home and (free := shutil.disk_usage(nearest_existing(home)).free) < MIN_HOME_BYTES:
        found = f"in the home, which has {format_bytes(free)} free: {', '.join(in_home)}"
        return WARNING, found, action
    places = dict.fromkeys(str(folder) for folder in folders.values())
    return OK, f"writable: {', '.join(places)}"


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or the folder itself where it isn't there yet."""
    try:
        with tempfile.TemporaryDirectory(prefix=".check_node_", dir=nearest_existing(folder)):
            return True
    except OSError:
        return False


@check("imports")
def check_imports(accelerator: str, *, timeout_s: float) -> Finding:
    """Whether the engine, and the libraries of kernels that are installed, can be imported."""
    (found,), _ = run_probes(import_all, accelerator, 1, timeout_s)
    action = "build the image again, or install with -c constraints.txt; --quick leaves this out"
    error, outcomes = str(found.get("error", "the process ended")), found.get("imports", {})
    done = {name: seconds for name, seconds in outcomes.items() if isinstance(seconds, float)}
    failed = {name: why or error for name, why in outcomes.items() if name not in done}
    waiting = [name for name, why in failed.items() if accelerator == "cpu" and _NO_DRIVER.search(why)]
    broken = [f"{name}: {why}" for name, why in failed.items() if name not in waiting]
    if broken or not done:
        return FAILED, "; ".join(broken) or error, action
    words = f"{', '.join(done)} in {sum(done.values()):.0f} s"
    if absent := [name for name in OPTIONAL if name not in outcomes]:
        words += f"; not installed: {', '.join(absent)}"
    if waiting:
        return WARNING, f"{words}; not without a driver: {', '.join(waiting)}", "look again on a node with GPUs"
    return OK, words


def import_all(probe: Probe) -> None:
    """Import modules one by one, and report the seconds or the error of each; None before: a crash then has a name."""
    outcomes: dict[str, float | str] = {}
    for name in (*REQUIRED, *(name for name in OPTIONAL if importlib.util.find_spec(name.partition(".")[0]))):
        probe.report(imports={**outcomes, name: None})
        begin_s = time.monotonic()
        try:
            importlib.import_module(name)
            outcomes[name] = round(time.monotonic() - begin_s, 2)
        except BaseException as error:  # a library may even exit
            outcomes[name] = one_line(error)
        probe.report(imports=outcomes)
