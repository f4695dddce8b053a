"""Context-parallel attention on several GPUs, with each of torch's kernels."""

from __future__ import annotations

import context_parallel_ranks
import pytest
import torch
from all_cards import NUM_CARDS, on_all_cards
from torch.nn.attention import SDPBackend, sdpa_kernel

from pretrainkit.megatron.attention_kernels import AttentionBlock, CuDnn, Efficient, Flash, block_kernel

pytestmark = pytest.mark.skipif(NUM_CARDS < 2, reason="needs two GPUs")
KERNELS = [
    (SDPBackend.CUDNN_ATTENTION, CuDnn, torch.bfloat16),
    (SDPBackend.FLASH_ATTENTION, Flash, torch.bfloat16),
    (SDPBackend.EFFICIENT_ATTENTION, Efficient, torch.bfloat16),
    (SDPBackend.EFFICIENT_ATTENTION, Efficient, torch.float32),
]


def test_output_and_gradients_are_those_of_one_rank() -> None:
    on_all_cards(_compare)


def _compare() -> None:
    for backend, kernel, dtype in KERNELS:
        for head_size in (64, 128):
            for length in (256, 600, 4096):
                with sdpa_kernel([backend, SDPBackend.MATH]):
                    q = torch.empty(1, 4, length, head_size, dtype=dtype, device="cuda")
                    if kernel is not Efficient:  # which serves what is left
                        assert isinstance(block_kernel(AttentionBlock(q, q[:, :2], q[:, :2], True, None)), kernel)
                    group = torch.distributed.group.WORLD
                    context_parallel_ranks.compare_with_one_rank(group, length, head_size, dtype, "cuda")
