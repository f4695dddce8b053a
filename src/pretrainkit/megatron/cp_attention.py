"""Causal attention over a sequence whose tokens lie on several ranks.

A sequence is cut into 2n chunks for n ranks and rank r holds chunks r and 2n-1-r (Megatron's balanced order). A rank's
two chunks follow each other, so among themselves they are plain causal attention, which needs nobody's keys: it runs
while those of the other ranks arrive. Of a rank j < r all queries see the first chunk, and none the second; of a rank
j > r the second chunk's queries see all, and the first chunk's nothing. So no part needs a mask, and each is one call
of torch's fastest kernel. Parts are merged by their sums of exponentials; in the backward pass each is given the merged
ones, as in ring attention (Liu et al. 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from pretrainkit.megatron.attention_parts import Part, part_kernel


def attend_across_ranks(
    query: Tensor,  # [s, b, h, d]: s tokens on this rank, an even number
    key: Tensor,  # [s, b, g, d], h a multiple of g
    value: Tensor,  # [s, b, g, d]
    group: distributed.ProcessGroup,
    scale: float | None = None,
) -> Tensor:  # [s, b, h, d]
    """Each token attends to all earlier ones of the sequence and to itself."""
    out: Tensor = _AcrossRanks.apply(query, key, value, group, scale)
    return out


class _AcrossRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, query: Tensor, key: Tensor, value: Tensor, group: distributed.ProcessGroup, scale: float | None
    ) -> Tensor:
        own = torch.stack((key, value))
        every = own.new_empty((group.size(), *own.shape))  # [n, 2, s, b, g, d]
        arrival = distributed.all_gather_into_tensor(every.flatten(0, 1), own, group=group, async_op=True)
        part = _part(query, *own, causal=True, scale=scale)
        kernel = part_kernel(part)
        out, sums, rest = kernel.forward(part)
        arrival.wait()
        merged = out.float()
        for first, seen in _others(every, group.rank()):
            out, new_sums, _ = kernel.forward(_part(query[first:], *seen.flatten(1, 2), causal=False, scale=scale))
            old_sums = sums[:, :, first:]
            merged[:, :, first:].lerp_(out.float(), torch.sigmoid(new_sums - old_sums).unsqueeze(-1))
            torch.logaddexp(old_sums, new_sums, out=old_sums)
        out = _tokens_first(merged.to(query.dtype))
        context.save_for_backward(query, every, out, sums)
        context.kernel, context.rest, context.group, context.scale = kernel, rest, group, scale
        return out

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, every, out, sums = context.saved_tensors
        rank = context.group.rank()

        def gradients(first: int, seen: Tensor, *, causal: bool) -> list[Tensor]:
            """Of the queries from `first` on, and of the keys and values [2, t, b, g, d] that they see."""
            part = _part(query[first:], *seen, causal=causal, scale=context.scale)
            outs = _heads_first(grad[first:]), _heads_first(out[first:]), sums[:, :, first:].contiguous()
            return [_tokens_first(found) for found in context.kernel.backward(part, *outs, context.rest)]

        grad_query, grad_every = torch.zeros_like(query), torch.zeros_like(every)
        for (first, seen), (_, places) in zip(_others(every, rank), _others(grad_every, rank), strict=True):
            queries, *found = gradients(first, seen.flatten(1, 2), causal=False)
            grad_query[first:] += queries
            for place, values in zip(places, found, strict=True):
                place.copy_(values.unflatten(0, place.shape[:2]))
        shares = torch.empty_like(every[0])  # of the gradients of this rank's keys and values, from the others
        arrival = distributed.reduce_scatter_tensor(
            shares, grad_every.flatten(0, 1), group=context.group, async_op=True
        )
        queries, keys, values = gradients(0, every[rank], causal=True)
        grad_query += queries
        arrival.wait()
        return grad_query, shares[0] + keys, shares[1] + values, None, None


def _part(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None) -> Part:
    return Part(_heads_first(query), _heads_first(key), _heads_first(value), causal, scale)


def _others(every: Tensor, rank: int) -> list[tuple[int, Tensor]]:
    """Views of what this rank's queries see of other ranks: from which query on, and [2, ranks, tokens, b, g, d]."""
    half = every.size(2) // 2
    found = [(0, every[:rank, :, :half]), (half, every[rank + 1 :])]
    return [(first, part.transpose(0, 1)) for first, part in found if part.size(0)]


def _heads_first(part: Tensor) -> Tensor:
    """[s, b, heads, d] as [b, heads, s, d]."""
    return part.permute(1, 2, 0, 3)


def _tokens_first(part: Tensor) -> Tensor:
    """[b, heads, s, d] as [s, b, heads, d]."""
    return part.permute(2, 0, 1, 3)
