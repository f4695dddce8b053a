"""One process of a trial: computes and all-reduces, and writes what it found (`pretrainkit.preflight.collectives`)."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

from pretrainkit.errors import one_line
from pretrainkit.preflight.trials import Findings, Trial

NUM_BYTES = {"gpu": 64 * 2**20, "cpu": 4 * 2**20}
"""Size of the all-reduce that is timed: large enough to be about bandwidth."""
REPETITIONS = 5
EXACT_SIZE = 1024
"""Rows and columns of the matrix product that is compared with the CPU's."""
SPEED_SIZE = 8192
"""Rows and columns of the matrix product that is timed."""
COLLECTIVE_SHARE, READ_SHARE = 0.5, 0.8
"""Shares of a trial's time after which an all-reduce, and reading what the others found, are given up."""
_START_S = time.monotonic()


def main() -> int:
    """Do the trial that the command line describes."""
    trial = Trial(**json.loads(sys.argv[1]))
    findings = Findings(trial.result_file)
    try:
        device = _device(trial)
        if trial.kind == "local":
            _local(trial, device, findings)
        elif trial.kind == "world":
            _world(trial, device, findings)
        else:
            _pair(trial, device, findings)
    except Exception as error:
        findings.add(error=one_line(error))
        os._exit(1)  # a communicator that has failed may hang while it is taken down
    os._exit(0)


def _device(trial: Trial) -> Any:
    import torch

    if trial.accelerator == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(trial.local_rank)
    return torch.device("cuda", trial.local_rank)


def _local(trial: Trial, device: Any, findings: Findings) -> None:
    import torch
    from torch.distributed import FileStore

    if device.type == "cuda":
        findings.add(tflops=_try_product(device), nccl=".".join(map(str, torch.cuda.nccl.version())))
    store = FileStore(f"{trial.folder}/store", trial.ranks_per_node)
    findings.add(**_all_reduce(store, trial.local_rank, trial.ranks_per_node, device, trial))


def _try_product(device: Any) -> float:
    """TFLOP/s of a bf16 matrix product, after one whose result must be exact. Raises ValueError if it isn't."""
    import torch

    generator = torch.Generator().manual_seed(0)
    exact = torch.randint(-8, 9, (EXACT_SIZE, EXACT_SIZE), generator=generator).to(torch.float32)
    expected = exact @ exact
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # Whole numbers this small are exact in bf16, and so are their sums in fp32: below 2**24.
    on_device = exact.to(device, torch.bfloat16)
    found = torch.mm(on_device.to(torch.float32), on_device.to(torch.float32)).cpu()
    if not torch.equal(found, expected):
        raise ValueError("a matrix product has a wrong result")
    rounded = torch.mm(on_device, on_device).cpu()
    if not torch.equal(rounded, expected.to(torch.bfloat16)):
        raise ValueError("a bf16 matrix product has a wrong result")
    factor = torch.randn(SPEED_SIZE, SPEED_SIZE, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        product = torch.mm(factor, factor)
    torch.cuda.synchronize()
    begin_s = time.monotonic()
    for _ in range(20):
        torch.mm(factor, factor, out=product)
    torch.cuda.synchronize()
    return 20 * 2 * SPEED_SIZE**3 / (time.monotonic() - begin_s) / 1e12


def _all_reduce(store: Any, rank: int, world_size: int, device: Any, trial: Trial) -> dict[str, Any]:
    """Bytes per second of an all-reduce ('bus bandwidth' of nccl-tests). Raises ValueError for a wrong sum."""
    import torch
    import torch.distributed as dist

    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=COLLECTIVE_SHARE * trial.timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    num_bytes = NUM_BYTES["gpu" if device.type == "cuda" else "cpu"]
    begin_s = 0.0
    for repetition in range(REPETITIONS + 1):
        values = torch.full((num_bytes // 4,), float(rank + 1), device=device)
        _wait_for(device)
        if repetition == 1:
            begin_s = time.monotonic()
        dist.all_reduce(values)
        if repetition == 0 and not bool((values == world_size * (world_size + 1) / 2).all()):
            raise ValueError("an all-reduce gave a wrong sum")
    _wait_for(device)
    elapsed_s = (time.monotonic() - begin_s) / REPETITIONS
    return {"num_bytes": num_bytes, "bytes_per_s": 2 * (world_size - 1) / world_size * num_bytes / elapsed_s}


def _wait_for(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def _world(trial: Trial, device: Any, findings: Findings) -> None:
    """All ranks of all nodes. The first rank of each node then reads in the store how it went on the others."""
    store = _connect(trial)
    rank = trial.node * trial.ranks_per_node + trial.local_rank
    word = "ok"
    try:
        findings.add(**_all_reduce(_part(store, "ranks"), rank, _world_size(trial), device, trial))
    except Exception as error:
        word = one_line(error)
    store.set(f"world/{rank}", word)
    if trial.local_rank == 0:
        words = [_read(store, f"world/{other}", READ_SHARE * trial.timeout_s) for other in range(_world_size(trial))]
        bad = sorted({other // trial.ranks_per_node for other, word in enumerate(words) if word != "ok"})
        findings.add(bad_nodes=_agreed(store, "world", bad, trial))


def _pair(trial: Trial, device: Any, findings: Findings) -> None:
    """The first ranks of two neighbouring nodes; after the second round it is known who reached nobody."""
    store = _connect(trial)
    if pair := pair_of(trial.kind, trial.node, trial.num_nodes):
        name = "-".join(map(str, pair))
        word = "ok"
        try:
            _all_reduce(_part(store, name), pair.index(trial.node), 2, device, trial)
        except Exception as error:
            word = one_line(error)
        store.set(f"pair/{name}/{trial.node}", word)
    if trial.kind == "odd":
        findings.add(**_agreed(store, "pairs", _judge_pairs(store, trial), trial))


def pair_of(kind: str, node: int, num_nodes: int) -> tuple[int, int] | None:
    """The pair of a node in a round: (0, 1), (2, 3), ... when even; (1, 2), (3, 4), ... and (last, 0) when odd."""
    first = node - (node % 2 if kind == "even" else (node + 1) % 2)
    if kind == "odd" and first in (-1, num_nodes - 1) and num_nodes % 2 == 0 and num_nodes > 2:
        return num_nodes - 1, 0
    return (first, first + 1) if first >= 0 and first + 1 < num_nodes else None


def judge(num_nodes: int, worked: dict[tuple[int, int], bool]) -> dict[str, Any]:
    """Nodes that reached nobody while others did, and otherwise the pairs that failed."""
    reached = {node for pair, works in worked.items() if works for node in pair}
    bad = [node for node in range(num_nodes) if node not in reached]
    failed = [list(pair) for pair, works in worked.items() if not works]
    if not reached:  # nobody reaches anybody: no single node is to blame
        return {"bad_nodes": [], "bad_pairs": failed}
    return {"bad_nodes": bad, "bad_pairs": failed}


def _judge_pairs(store: Any, trial: Trial) -> dict[str, Any]:
    pairs = {
        pair
        for kind in ("even", "odd")
        for node in range(trial.num_nodes)
        if (pair := pair_of(kind, node, trial.num_nodes))
    }
    worked = {
        pair: all(
            _read(store, f"pair/{pair[0]}-{pair[1]}/{node}", READ_SHARE * trial.timeout_s) == "ok" for node in pair
        )
        for pair in sorted(pairs)
    }
    return judge(trial.num_nodes, worked)


def _agreed(store: Any, name: str, verdict: Any, trial: Trial) -> Any:
    """Node 0's verdict, on every node."""
    if trial.node == 0:
        store.set(f"verdict/{name}", json.dumps(verdict))
        return verdict
    return json.loads(_read(store, f"verdict/{name}", trial.timeout_s) or json.dumps(verdict))


def _world_size(trial: Trial) -> int:
    return trial.num_nodes * trial.ranks_per_node


def _connect(trial: Trial) -> Any:
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=trial.timeout_s)
    return _part(TCPStore(trial.address, trial.port, is_master=False, timeout=timeout), "preflight")


def _part(store: Any, name: str) -> Any:
    from torch.distributed import PrefixStore

    return PrefixStore(name, store)


def _read(store: Any, key: str, until_s: float) -> str:
    """The text of a key; empty when it hasn't come `until_s` after the start of this process."""
    left_s = _START_S + until_s - time.monotonic()
    try:
        store.wait([key], timedelta(seconds=max(left_s, 0.1)))
    except Exception:  # torch has had several types for it
        return ""
    return str(store.get(key).decode())


if __name__ == "__main__":
    sys.exit(main())
