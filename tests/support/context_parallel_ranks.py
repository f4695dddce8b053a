"""Attention over a sequence that lies on several ranks, against the whole sequence on one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrainkit.megatron.attention import attend_across_ranks

BATCH, QUERY_HEADS, KEY_HEADS = 2, 4, 2


def compare_on_cpu(rank: int, world_size: int) -> None:
    """Compare over gloo, in fp32."""
    torch.distributed.init_process_group("gloo")
    for length in (2 * world_size, 30 * world_size):
        compare_with_one_rank(torch.distributed.group.WORLD, length, 16, torch.float32, "cpu")


def compare_with_one_rank(
    group: torch.distributed.ProcessGroup, length: int, head_size: int, dtype: torch.dtype, device: str
) -> None:
    """Output and gradients of this rank's tokens of sequences of `length`, against fp32 on whole sequences."""
    generator = torch.Generator().manual_seed(length)

    def random_leaf(heads: int) -> Tensor:
        values = torch.randn((length, BATCH, heads, head_size), generator=generator).to(dtype)
        return values.to(device, torch.float32).requires_grad_()

    whole = [random_leaf(heads) for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)]
    above = random_leaf(QUERY_HEADS).detach()
    q, k, v = (part.permute(1, 2, 0, 3) for part in whole)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True).permute(2, 0, 1, 3)
    expected.backward(above)

    chunks = torch.arange(length, device=device).chunk(2 * group.size())
    mine = torch.cat((chunks[group.rank()], chunks[-1 - group.rank()]))
    own = [part.detach()[mine].to(dtype).requires_grad_() for part in whole]
    output = attend_across_ranks(*own, group, 0.3)
    output.backward(above[mine].to(dtype))
    pairs = [(output, expected[mine]), *((part.grad, one.grad[mine]) for part, one in zip(own, whole, strict=True))]
    for name, (found, reference) in zip(("output", "queries", "keys", "values"), pairs, strict=True):
        error = ((found.float() - reference).norm() / reference.norm()).item()
        assert error < (1e-5 if dtype == torch.float32 else 0.01), f"{name}: relative error {error:.2g}"
