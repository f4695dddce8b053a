"""Tries out what ranks will do together: compute, and all-reduce within a node and over all nodes.

The trial is done by processes of its own (`collectives_rank`).
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrainkit.preflight.links import Link, active_infiniband, link_between
from pretrainkit.preflight.node_probes import FAILED, OK, SKIPPED, WARNING, Check, visible_gpus
from pretrainkit.preflight.trials import Trial, run_trials
from pretrainkit.units import format_bytes

RANK_MODULE = "pretrainkit.preflight.collectives_rank"
SLOW_SHARE = 0.8
"""Share of the median speed of a node's GPUs below which one is called slow (assumed; equal GPUs differ by 3%)."""
SLOW_LINK_SHARES = {"NVLink": 0.25, "PCIe": 0.1}
"""Shares of a link's rate below which an all-reduce is called slow. Assumed: nccl-tests reach 80 to 100% of NVLink's at
sizes of gigabytes, about half at the 64 MiB of this trial; PCIe is shared with neighbours."""
_CLUSTER_ADVICE = "exclude the node, or run with NCCL_DEBUG=INFO and show the log to the administrators"


def check_local(ranks: int, accelerator: str, *, timeout_s: float) -> list[Check]:
    """Checks 'compute' (GPUs only) and 'all-reduce' of one node."""
    if accelerator == "cpu" and ranks == 1:
        return [Check("all-reduce", SKIPPED, "one rank")]
    with tempfile.TemporaryDirectory(prefix="check_node_") as folder:
        first = Trial("local", accelerator, 0, ranks, folder, timeout_s)
        results = run_trials([replace(first, local_rank=rank) for rank in range(ranks)], RANK_MODULE)
        checks = [_compute(results)] if accelerator == "gpu" else []
        link = link_between([gpu["index"] for gpu in visible_gpus()[:ranks]]) if accelerator == "gpu" else None
        return [*checks, _all_reduce(results, accelerator, _nccl_transport(Path(folder)), link)]


def check_world(
    ranks: int, accelerator: str, *, address: str, port: int, node: int, hosts: Sequence[str], timeout_s: float
) -> Check:
    """The check 'network' over all nodes, the same on each of them."""
    with tempfile.TemporaryDirectory(prefix="check_node_") as folder:
        first = Trial("world", accelerator, 0, ranks, folder, timeout_s, node, len(hosts), address, port)
        result = run_trials([replace(first, local_rank=rank) for rank in range(ranks)], RANK_MODULE)[0]
        if result.get("bad_nodes") == []:
            speed = f", {format_bytes(result['num_bytes'])} at {format_bytes(result['bytes_per_s'])}/s"
            over = _nccl_transport(Path(folder)) or accelerator_word(accelerator)
            return _network(f"{ranks * len(hosts)} ranks on {len(hosts)} nodes over {over}{speed}")
        for kind in ("even", "odd"):
            result = run_trials([replace(first, kind=kind)], RANK_MODULE)[0]
    return _network_failure(result, hosts)


def accelerator_word(accelerator: str) -> str:
    """The library that ranks talk through."""
    return "NCCL" if accelerator == "gpu" else "gloo"


def _network(found: str, infiniband: Sequence[str] | None = None) -> Check:
    """The check of a network that works: with a warning when NCCL leaves its fast part unused."""
    devices = active_infiniband() if infiniband is None else infiniband
    if "NET/Socket" in found and devices:
        action = "the image needs the libraries of InfiniBand (rdma-core), and /dev/infiniband; look at NCCL_IB_DISABLE"
        return Check("network", WARNING, f"{found}; sockets, though there is InfiniBand: {', '.join(devices)}", action)
    return Check("network", OK, found)


def _network_failure(result: dict[str, Any], hosts: Sequence[str]) -> Check:
    def names(nodes: Sequence[int]) -> str:
        return ", ".join(f"{node} ({hosts[node]})" for node in nodes)

    action = _CLUSTER_ADVICE
    if "bad_nodes" not in result:
        return Check("network", FAILED, f"no answer from node {names([0])}: {result['error']}", action)
    if bad := result["bad_nodes"]:
        return Check("network", FAILED, f"node {names(bad)} can't be reached by the others", action)
    if pairs := result["bad_pairs"]:
        words = "; ".join(" and ".join(names([node]) for node in pair) for pair in pairs)
        return Check("network", FAILED, f"nodes that don't reach each other: {words}", action)
    return Check("network", FAILED, "the all-reduce over all nodes failed, though pairs of nodes work", action)


def _compute(results: list[dict[str, Any]]) -> Check:
    """Whether each GPU computes rightly, and as fast as its neighbours."""
    action = "exclude the node and tell its administrators"
    failed = [
        f"GPU {rank}: {_reason(result, 'tflops')}" for rank, result in enumerate(results) if "tflops" not in result
    ]
    if failed:
        return Check("compute", FAILED, "; ".join(failed), action)
    speeds = [float(result["tflops"]) for result in results]
    usual = statistics.median(speeds)
    found = f"{min(speeds):.0f} to {max(speeds):.0f} TFLOP/s, bf16 matrix product"
    slow = [f"GPU {rank} ({speed:.0f})" for rank, speed in enumerate(speeds) if speed < SLOW_SHARE * usual]
    if slow:
        return Check("compute", WARNING, f"slower than the others: {', '.join(slow)}; {found}", action)
    return Check("compute", OK, found)


def _all_reduce(results: list[dict[str, Any]], accelerator: str, transport: str, link: Link | None) -> Check:
    name = "all-reduce"
    failed = [
        f"rank {rank}: {_reason(result, 'bytes_per_s')}"
        for rank, result in enumerate(results)
        if "bytes_per_s" not in result
    ]
    if failed:
        return Check(name, FAILED, "; ".join(failed), _CLUSTER_ADVICE)
    first = results[0]
    library = f"NCCL {first['nccl']}" if accelerator == "gpu" else "gloo"
    ranks = f"{len(results)} rank{'s' if len(results) > 1 else ''} over {library}"
    if len(results) == 1:
        return Check(name, OK, ranks)
    speed = min(float(result["bytes_per_s"]) for result in results)
    found = (
        f"{ranks}{f', {transport}' if transport else ''}, {format_bytes(first['num_bytes'])} at {format_bytes(speed)}/s"
    )
    if link is None:
        return Check(name, OK, found)
    found += f"; {link.kind} gives {format_bytes(link.bytes_per_s)}/s"
    if link.kind == "NVLink" and transport and "P2P" not in transport:
        action = "unset NCCL_P2P_DISABLE; Docker needs --ipc=host; look at nvidia-smi topo -m"
        return Check(name, WARNING, f"{found}, and NCCL doesn't use it", action)
    if speed < SLOW_LINK_SHARES[link.kind] * link.bytes_per_s:
        action = "look at nvidia-smi topo -m and nvlink --status, and at who else uses the node"
        return Check(name, WARNING, f"{found}: slow", action)
    return Check(name, OK, found)


def _reason(result: dict[str, Any], wanted: str) -> str:
    return str(result.get("error", f"ended before it gave {wanted}"))


def _nccl_transport(folder: Path) -> str:
    """Through what NCCL's channels go (P2P/CUMEM, SHM, NET/IB, ...), from its own log."""
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("nccl.*")))
    channels = sorted(
        set(re.findall(r"\bvia ((?:P2P|SHM|NET)[\w/]*?)(?:/\d+.*|/read|/direct.*|)\s*$", text, re.MULTILINE))
    )
    networks = sorted(set(re.findall(r"Using network (\w+)", text)))
    words = channels + ([f"network {', '.join(networks)}"] if networks else [])
    return ", ".join(words)
