"""Products that overlap with their exchange, on cards that see each other's memory."""

from __future__ import annotations

import os
import socket

import exchange_ranks
import pytest
import torch

from pretrainkit.training.overlapped_linear import exchange_of

NUM_CARDS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(NUM_CARDS < 2, reason="needs two GPUs")
ROUNDS = 50


def test_products_and_gradients_are_those_of_one_rank() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_compare, args=(NUM_CARDS, port), nprocs=NUM_CARDS)


def _compare(rank: int, world_size: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=world_size)
    exchange = exchange_of(torch.distributed.group.WORLD)
    assert exchange, "these cards can't see each other's memory"
    for number in range(ROUNDS):
        length = 64 * (1 + number % 7)  # other sizes now and then: buffers grow, and ranks take other times
        compare = exchange_ranks.compare_with_one_rank
        compare(exchange, (length, 2, 512, 1024), torch.bfloat16, "cuda", accumulates=bool(number % 2))
    torch.distributed.destroy_process_group()
