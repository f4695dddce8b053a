"""Tensor-parallel GEMMs that overlap with their communication, on GPUs with peer access."""

from __future__ import annotations

import exchange_ranks
import pytest
import torch
from all_cards import NUM_CARDS, on_all_cards

from pretrainkit.megatron.tp_overlap import peer_memory_of

pytestmark = pytest.mark.skipif(NUM_CARDS < 2, reason="needs two GPUs")
ROUNDS = 50


def test_products_and_gradients_are_those_of_one_rank() -> None:
    on_all_cards(_compare)


def _compare() -> None:
    memory = peer_memory_of(torch.distributed.group.WORLD)
    assert memory, "these GPUs have no access to each other's memory"
    for number in range(ROUNDS):
        length = 64 * (1 + number % 7)  # other sizes now and then: buffers grow, and ranks take other times
        compare = exchange_ranks.compare_with_one_rank
        compare(memory, (length, 2, 512, 1024), torch.bfloat16, "cuda", accumulates=bool(number % 2))
