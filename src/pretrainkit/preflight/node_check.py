"""Whether a node can run ranks: everything that can be seen before they start, as one table."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrainkit.preflight import collectives, software_probes
from pretrainkit.preflight.node_probes import (
    CONSTRAINTS,
    ENGINE,
    FAILED,
    QUICK_WRITE_BYTES,
    SKIPPED,
    WRITE_BYTES,
    Check,
    check_clock,
    check_disk,
    check_gpus,
    check_limits,
    check_packages,
    check_time,
    needed_packages,
)


@dataclass(frozen=True)
class NodeCheckRequest:
    """What the ranks of a node will need."""

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
    constraints: Path | None = CONSTRAINTS
    """File of tested versions."""
    collectives: bool = True
    """Whether processes are started that compute and all-reduce; without them a check takes about a second."""
    timeout_s: float = 120.0
    """Longest wait for those processes."""
    software: bool = False
    """Whether the engine is imported, kernels of each library run once, and caches and foreign packages looked at."""
    kept: Path | None = None
    """File of the packages that an image must keep as its base has them (name==version lines)."""


@dataclass(frozen=True)
class NodeReport:
    """What a check of one node found."""

    host: str
    checks: tuple[Check, ...]

    @property
    def problems(self) -> list[str]:
        """Why no rank should be started here; empty when the node is good."""
        return [f"{check.name}: {check.found}" for check in self.checks if check.is_failed]

    @property
    def is_good(self) -> bool:
        """Whether ranks may be started."""
        return not self.problems

    def describe(self) -> str:
        """The table, one line a check, without a newline at the end."""
        lines = [f"node {self.host}: {'good' if self.is_good else 'BAD'}"]
        return "\n".join([*lines, *(check.describe() for check in self.checks)])

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"host": self.host, "good": self.is_good, "checks": [asdict(check) for check in self.checks]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> NodeReport:
        """The report that `to_json` made."""
        return cls(values["host"], tuple(Check(**check) for check in values["checks"]))


def check_node(request: NodeCheckRequest) -> NodeReport:
    """Look at this node alone. A check that itself breaks is a failure of the node, not an exception."""
    write_bytes = WRITE_BYTES if request.collectives else QUICK_WRITE_BYTES
    probes: dict[str, Callable[[], Check]] = {
        "disk": lambda: check_disk(request.output_dir, needed_bytes=request.needed_bytes, write_bytes=write_bytes),
        "clock": lambda: check_clock(request.output_dir),
        "limits": check_limits,
        "packages": lambda: check_packages(request.constraints),
        "time left": lambda: check_time(request.time_left_s, needed_s=request.needed_time_s),
    }
    if request.accelerator == "gpu":
        probes = {"gpus": lambda: check_gpus(request.ranks)} | probes
    if kept := request.kept:
        probes["image's own"] = lambda: software_probes.check_kept(kept)
    if request.software:
        probes["isolation"] = lambda: software_probes.check_isolation(os.environ, ENGINE | set(needed_packages()))
        probes["caches"] = lambda: software_probes.check_caches(os.environ)
    checks = [_guarded(name, probe) for name, probe in probes.items()]
    if request.software:
        accelerator = "cpu" if any(check.is_failed for check in checks if check.name == "gpus") else request.accelerator
        checks += software_probes.check_software(accelerator, timeout_s=request.timeout_s)
    if request.collectives:
        if any(check.is_failed for check in checks if check.name == "gpus"):
            checks.append(Check("all-reduce", SKIPPED, "not tried with too few GPUs"))
        else:
            checks += collectives.check_local(request.ranks, request.accelerator, timeout_s=request.timeout_s)
    return NodeReport(socket.gethostname(), tuple(checks))


def check_connections(request: NodeCheckRequest, address: str, port: int, *, node: int, hosts: Sequence[str]) -> Check:
    """Whether the ranks of all nodes reach each other: an all-reduce over all of them.

    All nodes call it at once, each with its place in `hosts`; they meet at a TCPStore that is open at address:port.
    When the all-reduce fails, pairs of nodes are tried to find the node that causes it; all nodes get one answer.
    """
    return _guarded(
        "network",
        lambda: collectives.check_world(
            request.ranks,
            request.accelerator,
            address=address,
            port=port,
            node=node,
            hosts=hosts,
            timeout_s=request.timeout_s,
        ),
    )


def _guarded(name: str, probe: Callable[[], Check]) -> Check:
    try:
        return probe()
    except Exception as error:  # whatever breaks here would break the ranks too
        return Check(name, FAILED, f"the check itself failed: {type(error).__name__}: {error}")
