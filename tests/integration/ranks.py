"""Trains in forked ranks: NeMo is imported once (10 s and more), then each rank is a fork of that process."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from pathlib import Path

RANK_TIMEOUT_S = 240


def train_rank(run_file: Path, rank: int, world_size: int, port: int, output: Path) -> None:
    """What torchrun and train.py do for one rank, in a process that has NeMo imported already."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
    }
    import torch

    from pretrainkit import logs
    from pretrainkit.config.run_file import read_run
    from pretrainkit.training import cpu

    cpu.bridge()
    from pretrainkit.training import nemo

    torch.set_num_threads(1)
    logs.configure()
    nemo.train(read_run(run_file), rank=rank, local_world_size=world_size)


def train(run_file: Path, world_size: int) -> None:
    """Run all ranks of a run on this machine; raises with the end of their output when one fails."""
    # The fork server looks for modules to preload on PYTHONPATH alone.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_preload"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outputs = [run_file.with_name(f"rank{rank}.log") for rank in range(world_size)]
    ranks = [
        context.Process(target=train_rank, args=(run_file, rank, world_size, port, output))
        for rank, output in enumerate(outputs)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(RANK_TIMEOUT_S)
    failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
    for process in ranks:
        process.kill()
        process.join()
    if failed:
        tails = "\n".join(f"--- rank {rank}\n{outputs[rank].read_text()[-3000:]}" for rank in failed)
        raise AssertionError(f"ranks {failed} of {world_size} failed or hung\n{tails}")


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))
