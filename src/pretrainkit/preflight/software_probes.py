"""What an image must have beside the right versions: imports and kernels that work, caches, nothing foreign."""

from __future__ import annotations

import os
import re
import shutil
import site
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrainkit.jobs.caches import HOME_CACHES
from pretrainkit.machine import installed_version
from pretrainkit.preflight.node_probes import FAILED, OK, SKIPPED, WARNING, Check
from pretrainkit.preflight.trials import Trial, run_trials
from pretrainkit.units import format_bytes

RANK_MODULE = "pretrainkit.preflight.software_rank"
SMALL_HOME = 50 * 10**9
"""Bytes free in a home below which caches don't belong there (assumed; the weights of an 8B model take 16 GB)."""
_NO_DRIVER = re.compile(r"libcuda|libnvidia|NVIDIA driver|CUDA driver|No CUDA GPUs|CUDA-capable", re.IGNORECASE)


def check_kept(path: Path) -> Check:
    """Whether the packages that an image must keep (name==version lines) are still those it came with."""
    lines = [line.partition("==") for line in path.read_text(encoding="utf-8").split()]
    found = {name: (version, installed_version(name)) for name, _, version in lines}
    changed = [f"{name} {was} -> {now or 'none'}" for name, (was, now) in found.items() if was != now]
    if changed:
        action = "build the image again; torch and its kin are compiled for each other"
        return Check("image's own", FAILED, f"replaced: {', '.join(changed)}", action)
    return Check("image's own", OK, f"{len(found)} packages of the base image, untouched" if found else "none")


def check_isolation(environment: Mapping[str, str], needed: set[str]) -> Check:
    """Whether packages of the home, or of PYTHONPATH, can take the place of those that are installed here."""
    name = "isolation"
    user_site = Path(site.getusersitepackages())
    in_home = _distributions(user_site) if site.ENABLE_USER_SITE else set()
    if in_the_way := sorted(in_home & needed):
        found = f"{user_site} takes the place of: {', '.join(in_the_way)}"
        return Check(name, FAILED, found, "export PYTHONNOUSERSITE=1, and leave the home outside (--no-home)")
    paths = [Path(path) for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    for path in paths:
        if in_the_way := sorted(_distributions(path) & needed):
            found = f"PYTHONPATH: {path} takes the place of: {', '.join(in_the_way)}"
            return Check(name, WARNING, found, "unset PYTHONPATH, unless it is meant")
    return Check(name, OK, "packages of the home stay out" if not site.ENABLE_USER_SITE else "no packages in the home")


def _distributions(folder: Path) -> set[str]:
    """Names of the packages that are installed in a folder."""
    return {
        re.sub(r"[-_.]+", "-", path.name.partition("-")[0]).lower()
        for pattern in ("*.dist-info", "*.egg-info")
        for path in folder.glob(pattern)
    }


def check_caches(environment: Mapping[str, str]) -> Check:
    """Whether the hub's, Triton's and W&B's caches can be written, and don't fill a small home."""
    home = Path(environment.get("HOME") or "/nonexistent")
    base = Path(environment["XDG_CACHE_HOME"]) if environment.get("XDG_CACHE_HOME") else None
    folders = {}
    for variable, default in HOME_CACHES.items():
        in_base = base / Path(default).name if base and default.startswith(".cache/") else home / default
        folders[variable] = Path(environment[variable]) if environment.get(variable) else in_base
    action = "set cache_dir in the site's file, or the variables, to a folder on a group disk"
    if closed := [f"{variable} ({folder})" for variable, folder in folders.items() if not _is_writable(folder)]:
        return Check("caches", FAILED, f"can't be written: {', '.join(closed)}", action)
    in_home = [variable for variable, folder in folders.items() if folder.is_relative_to(home)]
    if in_home and (free := shutil.disk_usage(_existing(home)).free) < SMALL_HOME:
        found = f"in the home, which has {format_bytes(free)} free: {', '.join(in_home)}"
        return Check("caches", WARNING, found, action)
    places = dict.fromkeys(str(folder) for folder in folders.values())
    return Check("caches", OK, f"writable: {', '.join(places)}")


def _existing(folder: Path) -> Path:
    """The folder, or the nearest thing above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _is_writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or the folder itself where it isn't there yet."""
    try:
        with tempfile.TemporaryDirectory(prefix=".check_node_", dir=_existing(folder)):
            return True
    except OSError:
        return False


def check_software(accelerator: str, *, timeout_s: float) -> list[Check]:
    """Checks 'imports' and, on a GPU, 'kernels': what the engine loads, and kernels of each library run once."""
    with tempfile.TemporaryDirectory(prefix="check_node_") as folder:
        found = run_trials([Trial("software", accelerator, 0, 1, folder, timeout_s)], RANK_MODULE)[0]
    return [_imports(found, accelerator), *([_kernels(found)] if accelerator == "gpu" else [])]


def _imports(found: dict[str, Any], accelerator: str) -> Check:
    action = "build the image again, or install with -c constraints.txt; --quick leaves this out"
    done, failed = found.get("imports", {}), dict(found.get("failed_imports", {}))
    if module := found.get("importing"):
        failed[module] = str(found.get("error", "the process ended"))
    waiting = {name: why for name, why in failed.items() if accelerator == "cpu" and _NO_DRIVER.search(why)}
    broken = [f"{name}: {why}" for name, why in failed.items() if name not in waiting]
    if broken or not done:
        return Check("imports", FAILED, "; ".join(broken) or str(found.get("error", "nothing imported")), action)
    seconds = sum(float(value) for value in done.values())
    words = f"{', '.join(done)} in {seconds:.0f} s"
    if absent := found.get("absent"):
        words += f"; not installed: {', '.join(absent)}"
    if waiting:
        names = ", ".join(waiting)
        return Check("imports", WARNING, f"{words}; not without a driver: {names}", "look again on a node with GPUs")
    return Check("imports", OK, words)


def _kernels(found: dict[str, Any]) -> Check:
    action = "take an image whose torch, Transformer Engine and flash attention were built for each other and this GPU"
    done, failed = found.get("kernels", {}), dict(found.get("failed_kernels", {}))
    if kernel := found.get("running"):
        failed[kernel] = str(found.get("error", "the process ended"))
    if failed:
        return Check("kernels", FAILED, "; ".join(f"{name}: {why}" for name, why in failed.items()), action)
    if not done:
        return Check("kernels", SKIPPED, "none: the imports come first")
    return Check("kernels", OK, ", ".join(f"{name} ({seconds:.1f} s)" for name, seconds in done.items()))
