"""Probes of what ranks do together: a matrix product on each GPU, an all-reduce within a node and over all nodes."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrainkit.errors import one_line
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
COLLECTIVE_SHARE, READ_SHARE = 0.5, 0.8
"""Shares of the timeout after which an all-reduce, and reading the other nodes' results, are given up."""
INFINIBAND = Path("/sys/class/infiniband")
_CLUSTER_ADVICE = "exclude the node, or run with NCCL_DEBUG=INFO and show the log to the administrators"
_START_S = time.monotonic()


def check_local(ranks: int, accelerator: str, *, timeout_s: float) -> list[Check]:
    """Checks 'compute' (GPUs only) and 'all-reduce' of one node."""
    if accelerator == "cpu" and ranks == 1:
        return [Check("all-reduce", SKIPPED, "one rank")]
    results, nccl_log = run_probes(run_local, accelerator, ranks, timeout_s)
    checks = [_compute(results)] if accelerator == "gpu" else []
    has_nvlink = accelerator == "gpu" and all(gpu.has_nvlink for gpu in read_gpus()[:ranks])
    return [*checks, _all_reduce(results, accelerator, _nccl_transport(nccl_log), has_nvlink)]


@check("network")
def check_world(request: NodeCheckRequest, address: str, port: int, *, node: int, hosts: Sequence[str]) -> Finding:
    """The check 'network': an all-reduce over the ranks of all nodes.

    All nodes call it at once, each with its place in `hosts`, while a TCPStore is open at address:port. All of them
    get the same answer.
    """
    ranks, accelerator = request.ranks, request.accelerator
    of_all_nodes = {"node": node, "num_nodes": len(hosts), "address": address, "port": port}
    (result, *_), nccl_log = run_probes(run_world, accelerator, ranks, request.timeout_s, **of_all_nodes)
    library = _nccl_transport(nccl_log) or ("NCCL" if accelerator == "gpu" else "gloo")
    if "answers" not in result:
        return FAILED, f"no answer from node 0 ({hosts[0]}): {result['error']}", _CLUSTER_ADVICE
    if failure := _network_failure(result["answers"], hosts):
        return FAILED, failure, _CLUSTER_ADVICE
    speed = f"{format_bytes(result['num_bytes'])} at {format_bytes(result['bytes_per_s'])}/s"
    return _network(f"{ranks * len(hosts)} ranks on {len(hosts)} nodes over {library}, {speed}")


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


def run_local(probe: Probe) -> None:
    """A rank of a node's probe: a matrix product on a GPU, and an all-reduce with the node's other ranks."""
    import torch
    from torch.distributed import FileStore

    device = _device(probe)
    if device.type == "cuda":
        probe.report(tflops=_multiply(device), nccl=".".join(map(str, torch.cuda.nccl.version())))
    store = FileStore(f"{probe.folder}/store", probe.ranks_per_node)
    probe.report(**_time_all_reduce(store, probe.local_rank, probe.ranks_per_node, device, probe))


def run_world(probe: Probe) -> None:
    """An all-reduce over all nodes; the first rank of each node then reads in the store how it went on the others."""
    from torch.distributed import PrefixStore, TCPStore

    timeout = timedelta(seconds=probe.timeout_s)
    store = PrefixStore("preflight", TCPStore(probe.address, probe.port, is_master=False, timeout=timeout))
    rank, world_size = probe.node * probe.ranks_per_node + probe.local_rank, probe.num_nodes * probe.ranks_per_node
    answer = "ok"
    try:
        probe.report(**_time_all_reduce(PrefixStore("ranks", store), rank, world_size, _device(probe), probe))
    except Exception as error:
        answer = one_line(error)
    store.set(f"rank/{rank}", answer)
    if probe.local_rank == 0:
        answers = [_read(store, f"rank/{other}", READ_SHARE * probe.timeout_s) for other in range(world_size)]
        of_nodes = [answers[node * probe.ranks_per_node :][: probe.ranks_per_node] for node in range(probe.num_nodes)]
        worst = [next((answer for answer in node if answer != "ok"), "ok") for node in of_nodes]
        # Node 0's view is everyone's, so that all nodes report the same.
        if probe.node == 0:
            store.set("answers", "\n".join(worst))
        agreed = _read(store, "answers", probe.timeout_s)
        probe.report(answers=agreed.split("\n") if agreed else worst)


def _device(probe: Probe) -> Any:
    import torch

    if probe.accelerator == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(probe.local_rank)
    return torch.device("cuda", probe.local_rank)


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


def _read(store: Any, key: str, until_s: float) -> str:
    """The text of a key; empty when it isn't there `until_s` after the start of this process."""
    left_s = _START_S + until_s - time.monotonic()
    try:
        store.wait([key], timedelta(seconds=max(left_s, 0.1)))
    except Exception:  # torch has had several types for it
        return ""
    return str(store.get(key).decode())
