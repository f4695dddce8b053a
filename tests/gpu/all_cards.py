"""A process on each card of this machine, with NCCL between them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch

NUM_CARDS = torch.cuda.device_count()


def on_all_cards(function: Callable[[], None]) -> None:
    """Call a function of a module on every card; raises what it raised on one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_on_one, args=(port, function), nprocs=NUM_CARDS)


def _on_one(rank: int, port: int, function: Callable[[], None]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=NUM_CARDS)
    function()
    torch.distributed.destroy_process_group()
