"""How much of this machine's memory a process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(*, cgroups: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Memory that can be taken without swapping, within every control group (cgroup v2) that holds this process.

    Containers and schedulers limit a job's memory by control groups; what the kernel calls available ignores them.
    """
    available = int(psutil.virtual_memory().available)
    for group in _groups(cgroups, own):
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                used = int((group / "memory.current").read_text()) - _reclaimable(group)
                available = min(available, int(limit) - used)
        except (OSError, ValueError):
            continue
    return max(available, 0)


def _groups(cgroups: Path, own: Path) -> list[Path]:
    """The control group of this process and those around it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return [cgroups]
    path = next((line[len("0::/") :] for line in lines if line.startswith("0::/")), "")
    group = cgroups / path
    return [group, *(parent for parent in group.parents if parent.is_relative_to(cgroups))]


def _reclaimable(group: Path) -> int:
    """File pages that the kernel drops when memory is short; they count as used."""
    for line in (group / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
