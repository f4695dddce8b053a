"""Causal attention with and without a sliding window, by torch's scaled_dot_product_attention; and with a soft cap."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

MAX_QUERIES = 1024
"""Queries that attend with a mask at a time, which bounds the memory of masks and scores."""


def attend_causally(
    query: Tensor,  # [b, h, s, d]: of the last s tokens
    key: Tensor,  # [b, g, t, d], h a multiple of g
    value: Tensor,  # [b, g, t, d]
    scale: float | None,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:  # [b, h, s, d]
    """Each token attends to itself and all before it or, with a window, to the last `window` of these."""
    settings: dict[str, Any] = {"scale": scale, "enable_gqa": query.size(1) != key.size(1)}
    length, older = query.size(2), key.size(2) - query.size(2)
    if not 0 < window < length + older and not softcap:
        settings |= {"attn_mask": causal_lower_right(length, length + older)} if older else {"is_causal": True}
        return F.scaled_dot_product_attention(query, key, value, **settings)
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
            _capped(*block, mask, scale, softcap)
            if softcap
            else F.scaled_dot_product_attention(*block, attn_mask=mask, **settings)
        )
    return torch.cat(outs, dim=2)


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, softcap: float) -> Tensor:
    """Attention whose scores are capped; as transformers' Gemma 2 has it, softmax in fp32."""
    key, value = (part.repeat_interleave(query.size(1) // part.size(1), dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (query.size(3) ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype) @ value
