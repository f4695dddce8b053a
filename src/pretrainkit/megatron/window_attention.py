"""Causal attention by torch's scaled_dot_product_attention, with a sliding window, a soft cap or sinks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from pretrainkit.megatron.attention_kernels import AttentionBlock, attend

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
    settings: dict[str, Any] = {"scale": scale, "enable_gqa": query.size(1) != key.size(1)}
    length, older = query.size(2), key.size(2) - query.size(2)
    if not 0 < window < length + older and not softcap and sinks is None:
        settings |= {"attn_mask": causal_lower_right(length, length + older)} if older else {"is_causal": True}
        return F.scaled_dot_product_attention(query, key, value, **settings)
    if _has_kernel(query) and not older and not softcap:
        return attend(AttentionBlock(query, key, value, True, scale), window if window < length else 0, sinks)
    tokens = torch.arange(length + older, device=query.device)
    outs = []
    window = window or length + older
    step = min(window, MAX_QUERIES)  # queries at a time
    for first in range(0, length, step):
        end = min(first + step, length)
        keys = slice(max(older + first - window + 1, 0), older + end)
        distance = tokens[older + first : older + end, None] - tokens[keys]
        mask = (distance >= 0) & (distance < window)
        block = query[:, :, first:end], key[:, :, keys], value[:, :, keys]
        outs.append(
            _by_scores(*block, mask, scale, softcap, sinks)
            if softcap or sinks is not None
            else F.scaled_dot_product_attention(*block, attn_mask=mask, **settings)
        )
    return torch.cat(outs, dim=2)


def _has_kernel(query: Tensor) -> bool:
    """Whether torch's kernels for windows and with lse serve these queries."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


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
