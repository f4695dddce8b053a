"""Causal attention by torch's scaled_dot_product_attention, with a sliding window, a soft cap or sinks."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from pretrainkit.megatron.attention_kernels import AttentionBlock, CausalFlash, attend, block_kernel

MAX_QUERIES = 1024
"""Queries that attend with a mask at a time, which bounds the memory of masks and scores."""


def attend_causally(
    query: Tensor,  # [b, h, s, d]: of the last s tokens
    key: Tensor,  # [b, g, t, d], h a multiple of g
    value: Tensor,  # [b, g, t, d]
    scale: float | None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [h]: one more score of each head, of no token
) -> Tensor:  # [b, h, s, d]
    """Each token attends to itself and all before it or, with a window, to the last `window` of these."""
    length, total = query.size(2), key.size(2)
    window = window if window < total else 0
    if not window and not softcap and sinks is None:
        mask = {"is_causal": True} if length == total else {"attn_mask": causal_lower_right(length, total)}
        return F.scaled_dot_product_attention(
            query, key, value, scale=scale, enable_gqa=_has_groups(query, key), **mask
        )
    if has_flash(query) and not softcap:
        block = AttentionBlock(query, key, value, True, scale)
        kernel = CausalFlash(window) if window or length < total else block_kernel(block)
        return attend(block, kernel, sinks)
    outs = []
    step = min(window or total, MAX_QUERIES)  # queries at a time
    for first in range(total - length, total, step):
        end = min(first + step, total)
        begin = max(first - window + 1, 0) if window else 0
        queries = slice(first + length - total, end + length - total)
        tensors = query[:, :, queries], key[:, :, begin:end], value[:, :, begin:end]
        attend_masked = partial(_masked, *tensors, first - begin, window, scale, softcap, sinks)
        if length > MAX_QUERIES:  # of the masks and scores no more than one step's are in memory
            outs.append(checkpoint(attend_masked, use_reentrant=False, preserve_rng_state=False))
        else:
            outs.append(attend_masked())
    return torch.cat(outs, dim=2)


def has_flash(query: Tensor) -> bool:
    """Whether torch's kernels for windows and segments, and with lse, serve these queries."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def _has_groups(query: Tensor, key: Tensor) -> bool:
    return query.size(1) != key.size(1)


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    older: int,
    window: int,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """`attend_causally` of some queries, with a mask; there are `older` keys before that of the first."""
    tokens = torch.arange(key.size(2), device=query.device)
    distance = tokens[older : older + query.size(2), None] - tokens
    mask = (distance >= 0) & (distance < (window or key.size(2)))
    if softcap or sinks is not None:
        return _by_scores(query, key, value, mask, scale, softcap, sinks)
    groups = _has_groups(query, key)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=groups)


def _by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention whose scores are capped or joined by sinks; as transformers' Gemma 2 has it, softmax in fp32."""
    key, value = (part.repeat_interleave(query.size(1) // part.size(1), dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (query.size(3) ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    shares = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return shares[..., : key.size(2)] @ value
