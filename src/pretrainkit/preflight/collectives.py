"""Probes of what ranks do together: a matrix product on each GPU, an all-reduce within a node and over all nodes."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrainkit.jobs.rendezvous import Rendezvous
from pretrainkit.machine import read_gpus
from pretrainkit.preflight.probe import Probe, run_probes
from pretrainkit.preflight.report import FAILED, OK, SKIPPED, WARNING, Check, Finding, check
from pretrainkit.units import format_bytes

if TYPE_CHECKING:
    from pretrainkit.preflight.node import NodeCheckRequest

SLOW_SHARE = 0.8
"""Share of the median speed of a node's GPUs below which one is called slow (assumed; equal GPUs differ by 3%)."""
NUM_BYTES = {"gpu": 64 * 2**20, "cpu": 4 * 2**20}
"""Size of the all-reduce: large enough for its time to depend on bandwidth."""
REPETITIONS = 5
EXACT_SIZE, SPEED_SIZE = 1024, 8192
"""Rows and columns of the matrix product that is compared with the CPU's, and of the one that is timed."""
COLLECTIVE_SHARE = 0.5
"""Share of the timeout after which an all-reduce is given up."""
INFINIBAND = Path("/sys/class/infiniband")
_CLUSTER_ADVICE = "exclude the node, or run with NCCL_DEBUG=INFO and show the log to the administrators"


def check_local(ranks: int, accelerator: str, *, timeout_s: float) -> list[Check]:
    """Checks 'compute' (GPUs only) and 'all-reduce' of one node."""
    if accelerator == "cpu" and ranks == 1:
        return [Check("all-reduce", SKIPPED, "one rank")]
    results, nccl_log = run_probes(run_ranks, accelerator, ranks, timeout_s)
    checks = [_compute(results)] if accelerator == "gpu" else []
    has_nvlink = accelerator == "gpu" and all(gpu.has_nvlink for gpu in read_gpus()[:ranks])
    return [*checks, _all_reduce(results, accelerator, _nccl_transport(nccl_log), has_nvlink)]


@check("network")
def check_world(
    request: NodeCheckRequest, nodes: Rendezvous, address: str, port: int, *, hosts: Sequence[str]
) -> Finding:
    """The check 'network': an all-reduce over the ranks of all nodes.

    All nodes, whose names are `hosts`, call it at once, while a TCPStore is open at address:port. All of them get the
    head's answer; it has heard of all others, or waited for them, before it gives one.
    """
    of_all_nodes = {"node": nodes.node, "num_nodes": nodes.num_nodes, "address": address, "port": port}
    results, nccl_log = run_probes(run_ranks, request.accelerator, request.ranks, request.timeout_s, **of_all_nodes)
    failures = [one.get("error", "the process exited early") for one in results if "bytes_per_s" not in one]
    nodes.post("answer", {"answer": failures[0] if failures else "ok"})
    if nodes.is_head:
        found = nodes.collect("answer", range(nodes.num_nodes), request.timeout_s)
        answers = [found[node]["answer"] if node in found else "" for node in range(nodes.num_nodes)]
        if failure := _network_failure(answers, hosts):
            finding: Finding = FAILED, failure, _CLUSTER_ADVICE
        else:
            library = _nccl_transport(nccl_log) or ("NCCL" if request.accelerator == "gpu" else "gloo")
            speed = f"{format_bytes(results[0]['num_bytes'])} at {format_bytes(results[0]['bytes_per_s'])}/s"
            finding = _network(f"{request.ranks * len(hosts)} ranks on {len(hosts)} nodes over {library}, {speed}")
        nodes.post("verdict", {"finding": finding})
    verdict = nodes.collect("verdict", [0], 2 * request.timeout_s)
    return tuple(verdict[0]["finding"]) if verdict else (FAILED, f"no answer from node 0 ({hosts[0]})", _CLUSTER_ADVICE)


def _network(found: str) -> Finding:
    """The finding of a network that works; a warning when NCCL leaves active InfiniBand (or RoCE) unused."""
    ports = sorted(INFINIBAND.glob("*/ports/*/state"))
    active = dict.fromkeys(port.parts[-4] for port in ports if "ACTIVE" in port.read_text(errors="replace"))
    if "NET/Socket" in found and active:
        action = "the image needs the libraries of InfiniBand (rdma-core), and /dev/infiniband; look at NCCL_IB_DISABLE"
        return WARNING, f"{found}; sockets, though there is InfiniBand: {', '.join(active)}", action
    return OK, found


def _network_failure(answers: list[str], hosts: Sequence[str]) -> str:
    """What is wrong with the network, by what each node answered: 'ok', an error, or nothing; empty if all is well."""
    silent = [f"{node} ({hosts[node]})" for node, answer in enumerate(answers) if not answer]
    if silent:
        return f"no answer from node {', '.join(silent)}"
    failed = [f"node {node} ({hosts[node]}): {answer}" for node, answer in enumerate(answers) if answer != "ok"]
    return f"the all-reduce failed: {'; '.join(failed)}" if failed else ""


@check("compute")
def _compute(results: list[dict[str, Any]]) -> Finding:
    """Whether each GPU computes exactly, and as fast as its neighbours."""
    action = "exclude the node and tell its administrators"
    if failed := _failures("GPU", results, "tflops"):
        return FAILED, failed, action
    speeds = [float(result["tflops"]) for result in results]
    usual = statistics.median(speeds)
    found = f"{min(speeds):.0f} to {max(speeds):.0f} TFLOP/s, bf16 matrix product"
    slow = [f"GPU {rank} ({speed:.0f})" for rank, speed in enumerate(speeds) if speed < SLOW_SHARE * usual]
    if slow:
        return WARNING, f"slower than the others: {', '.join(slow)}; {found}", action
    return OK, found


@check("all-reduce")
def _all_reduce(results: list[dict[str, Any]], accelerator: str, transport: str, has_nvlink: bool) -> Finding:
    if failed := _failures("rank", results, "bytes_per_s"):
        return FAILED, failed, _CLUSTER_ADVICE
    first = results[0]
    found = f"{len(results)} rank{'s' if len(results) > 1 else ''} over "
    found += f"NCCL {first['nccl']}" if accelerator == "gpu" else "gloo"
    if len(results) == 1:
        return OK, found
    speed = min(float(result["bytes_per_s"]) for result in results)
    found += f"{f', {transport}' if transport else ''}, {format_bytes(first['num_bytes'])} at {format_bytes(speed)}/s"
    if has_nvlink and transport and "P2P" not in transport:
        action = "unset NCCL_P2P_DISABLE; Docker needs --ipc=host; look at nvidia-smi topo -m"
        return WARNING, f"{found}; the GPUs have NVLink, and NCCL doesn't use it", action
    return OK, found


def _failures(what: str, results: list[dict[str, Any]], wanted: str) -> str:
    """Each rank that didn't get as far as the result `wanted`, with the reason; empty when there is none."""
    return "; ".join(
        f"{what} {rank}: {result.get('error', 'the process exited early')}"
        for rank, result in enumerate(results)
        if wanted not in result
    )


def _nccl_transport(text: str) -> str:
    """The transports of NCCL's channels (P2P/CUMEM, SHM, NET/IB, ...), from its own log."""
    channels = sorted(
        set(re.findall(r"\bvia ((?:P2P|SHM|NET)[\w/]*?)(?:/\d+.*|/read|/direct.*|)\s*$", text, re.MULTILINE))
    )
    networks = sorted(set(re.findall(r"Using network (\w+)", text)))
    words = channels + ([f"network {', '.join(networks)}"] if networks else [])
    return ", ".join(words)


def run_ranks(probe: Probe) -> None:
    """A rank's probe: an all-reduce with the ranks of all nodes, or of this one after a matrix product on its GPU."""
    import torch
    from torch.distributed import FileStore, PrefixStore, TCPStore

    device, timeout = torch.device("cpu"), timedelta(seconds=probe.timeout_s)
    if probe.accelerator == "gpu":
        device = torch.device("cuda", probe.local_rank)
        torch.cuda.set_device(device)
    if probe.address:
        store: Any = PrefixStore("preflight", TCPStore(probe.address, probe.port, is_master=False, timeout=timeout))
    else:
        store = FileStore(f"{probe.folder}/store", probe.ranks_per_node)
        if device.type == "cuda":
            probe.report(tflops=_multiply(device), nccl=".".join(map(str, torch.cuda.nccl.version())))
    rank, world_size = probe.node * probe.ranks_per_node + probe.local_rank, probe.num_nodes * probe.ranks_per_node
    probe.report(**_time_all_reduce(store, rank, world_size, device, probe))
    # The last data of this rank may still be under way: it exits when all have got theirs.
    store.set(f"done/{rank}", "")
    store.wait([f"done/{other}" for other in range(world_size)], COLLECTIVE_SHARE * timeout)


def _multiply(device: Any) -> float:
    """TFLOP/s of a bf16 matrix product, after one whose result must be exact. Raises ValueError if it isn't."""
    import torch

    generator = torch.Generator().manual_seed(0)
    exact = torch.randint(-8, 9, (EXACT_SIZE, EXACT_SIZE), generator=generator).to(torch.float32)
    expected = exact @ exact
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # Whole numbers this small are exact in bf16, and so are their sums in fp32: below 2**24.
    on_device = exact.to(device, torch.bfloat16)
    found = torch.mm(on_device.to(torch.float32), on_device.to(torch.float32)).cpu()
    rounded = torch.mm(on_device, on_device).cpu()
    if not torch.equal(found, expected) or not torch.equal(rounded, expected.to(torch.bfloat16)):
        raise ValueError("a matrix product has a wrong result")
    factor = torch.randn(SPEED_SIZE, SPEED_SIZE, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        product = torch.mm(factor, factor)
    torch.cuda.synchronize()
    begin_s = time.monotonic()
    for _ in range(20):
        torch.mm(factor, factor, out=product)
    torch.cuda.synchronize()
    return 20 * 2 * SPEED_SIZE**3 / (time.monotonic() - begin_s) / 1e12


def _time_all_reduce(store: Any, rank: int, world_size: int, device: Any, probe: Probe) -> dict[str, Any]:
    """Bytes per second of an all-reduce ('bus bandwidth' of nccl-tests). Raises ValueError for a wrong sum."""
    import torch
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=COLLECTIVE_SHARE * probe.timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    num_bytes = NUM_BYTES[probe.accelerator]
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    begin_s = 0.0
    for repetition in range(REPETITIONS + 1):
        values = torch.full((num_bytes // 4,), float(rank + 1), device=device)
        synchronize()
        if repetition == 1:
            begin_s = time.monotonic()
        dist.all_reduce(values)
        if repetition == 0 and not bool((values == world_size * (world_size + 1) / 2).all()):
            raise ValueError("an all-reduce gave a wrong sum")
    synchronize()
    elapsed_s = (time.monotonic() - begin_s) / REPETITIONS
    return {"num_bytes": num_bytes, "bytes_per_s": 2 * (world_size - 1) / world_size * num_bytes / elapsed_s}
