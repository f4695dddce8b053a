"""Causal attention within documents: tokens don't attend to other documents of the same sequence.

The bounds of a microbatch's documents are passed as one int32 tensor [n + 1] in place of Megatron's attention mask,
through every pipeline stage: document i has tokens bounds[i] to bounds[i + 1] of the microbatch's concatenated
sequences, and no document crosses the end of a sequence. No S x S mask is built.

Rotary positions count within the sequence and are not reset at document boundaries: attention depends on differences of
positions only, which are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def document_bounds(position_ids: Tensor) -> Tensor:
    """Bounds [n + 1], int32, of the documents in position ids [b, s]: a document starts where the position is 0."""
    begins = torch.nonzero(position_ids.reshape(-1) == 0).flatten()
    return F.pad(begins, (0, 1), value=position_ids.numel()).to(torch.int32)


def with_document_bounds(data_step: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's data step, with the bounds of each microbatch's documents as its attention mask.

    They are computed on the CPU before the batch is copied to the device, which avoids a device synchronization.
    """

    def data_step_with_bounds(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        batch = next(batches)
        sample = batch[0] if isinstance(batch, tuple) else batch
        sample["attention_mask"] = document_bounds(sample["position_ids"])
        return data_step(iter([batch]), *args, **kwargs)

    return data_step_with_bounds


def attend_within_documents(
    query: Tensor,  # [s, b, h, d]
    key: Tensor,  # [s, b, g, d], h a multiple of g
    value: Tensor,  # [s, b, g, d]
    bounds: Tensor,  # [n + 1], int32, on the same device
    scale: float | None = None,
) -> Tensor:  # [s, b, h * d]
    """Each token attends to the tokens of its own document up to itself."""
    length, batch = query.shape[:2]
    q, k, v = (part.transpose(0, 1).flatten(0, 1) for part in (query, key, value))  # [b * s, heads, d]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        out = _flash(q, k, v, bounds, length, scale)
    else:
        out = _one_by_one(q, k, v, bounds, scale)
    return out.unflatten(0, (batch, length)).transpose(0, 1).flatten(2)


def _flash(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float | None) -> Tensor:
    """All documents in one call of the flash kernel; `longest` is no less than the longest, which need not be known."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )[0]
    return out


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float | None) -> Tensor:
    """One call per document, for what the flash kernel doesn't support: fp32 and CPU."""
    lengths = bounds.diff().tolist()
    outs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):  # [l, heads, d]
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))  # [1, heads, l, d]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.size(1) != k.size(1))
        outs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outs)
