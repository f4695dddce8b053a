"""Causal attention with and without a sliding window, by torch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


def attend_causally(
    query: Tensor,  # [b, h, s, d]: of the last s tokens
    key: Tensor,  # [b, g, t, d], h a multiple of g
    value: Tensor,  # [b, g, t, d]
    scale: float | None,
    window: int = 0,
) -> Tensor:  # [b, h, s, d]
    """Each token attends to itself and all before it or, with a window, to the last `window` of these."""
    settings: dict[str, Any] = {"scale": scale, "enable_gqa": query.size(1) != key.size(1)}
    length, older = query.size(2), key.size(2) - query.size(2)
    if not 0 < window < length + older:
        settings |= {"attn_mask": causal_lower_right(length, length + older)} if older else {"is_causal": True}
        return F.scaled_dot_product_attention(query, key, value, **settings)
    tokens = torch.arange(length + older, device=query.device)
    outs = []
    for first in range(0, length, window):  # as many queries at a time, which attend to less than twice as many keys
        end = min(first + window, length)
        keys = slice(max(older + first - window + 1, 0), older + end)
        distance = tokens[older + first : older + end, None] - tokens[keys]
        mask = (distance >= 0) & (distance < window)
        block = query[:, :, first:end], key[:, :, keys], value[:, :, keys]
        outs.append(F.scaled_dot_product_attention(*block, attn_mask=mask, **settings))
    return torch.cat(outs, dim=2)
