"""What connects the GPUs of this node, and how fast it is by its own account: the measure for an all-reduce."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")
_PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of a lane in one direction, by generation (specification)."""


@dataclass(frozen=True)
class Link:
    """What the slowest-connected of several GPUs has."""

    kind: str
    """NVLink, when it connects all of them, or PCIe."""
    bytes_per_s: float
    """Of one GPU in one direction."""


def link_between(indices: Sequence[str]) -> Link | None:
    """The link of the GPUs with these numbers of nvidia-smi; None for a single one or when it doesn't say."""
    if len(indices) < 2:
        return None
    if has_nvlink(_nvidia_smi("topo", "-m"), indices):
        rates = [nvlink_rate(_nvidia_smi("nvlink", "--status", "-i", index)) for index in indices]
        return Link("NVLink", min(rates)) if min(rates) else None
    fields = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"
    rates = [pcie_rate(_nvidia_smi(fields, "--format=csv,noheader", "-i", index)) for index in indices]
    return Link("PCIe", min(rates)) if min(rates) else None


def has_nvlink(topology: str, indices: Sequence[str]) -> bool:
    """Whether each two of the GPUs have NVLink between them, in the words of `nvidia-smi topo -m`."""
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", topology).splitlines()]
    header = next((words for words in lines if words and words[0].startswith("GPU")), [])
    rows = {words[0]: dict(zip(header, words[1:], strict=False)) for words in lines if words and words is not header}
    names = [f"GPU{index}" for index in indices]
    pairs = [(one, other) for one in names for other in names if one != other]
    return all(rows.get(one, {}).get(other, "").startswith("NV") for one, other in pairs)


def nvlink_rate(status: str) -> float:
    """Bytes per second of all active links of a GPU, in the words of `nvidia-smi nvlink --status`."""
    return sum(float(rate) for rate in re.findall(r"Link \d+: ([0-9.]+) GB/s", status)) * 1e9


def pcie_rate(answer: str) -> float:
    """Bytes per second of 'generation, lanes'; 0 for anything else."""
    match = re.match(r"\s*(\d+)\s*,\s*(\d+)\s*$", answer)
    return _PCIE_LANE.get(int(match[1]), 0.0) * int(match[2]) if match else 0.0


def active_infiniband(folder: Path = INFINIBAND) -> list[str]:
    """Names of the InfiniBand (or RoCE) devices of this node that have an active port."""
    ports = sorted(folder.glob("*/ports/*/state"))
    return list(dict.fromkeys(port.parts[-4] for port in ports if "ACTIVE" in port.read_text(errors="replace")))


def _nvidia_smi(*words: str) -> str:
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
