"""Processes on the cards of this machine, with NCCL between them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch

NUM_CARDS = torch.cuda.device_count()


def on_all_cards(function: Callable[[], None]) -> None:
    """Call a function of a module on every card; raises what it raised on one."""
    on_ranks(function, NUM_CARDS)


def on_ranks(function: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Call a function of a module with arguments in so many processes; raises what it raised in one.

    Processes that share a card say that they are on different hosts, which makes NCCL copy through sockets.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_on_one, args=(num_ranks, port, function, arguments), nprocs=num_ranks)


def _on_one(rank: int, num_ranks: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if num_ranks > NUM_CARDS:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
    torch.cuda.set_device(rank % NUM_CARDS)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=num_ranks)
    function(*arguments)
    torch.distributed.destroy_process_group()
