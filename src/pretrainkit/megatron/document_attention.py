"""Causal attention within documents that share a row, with and without context parallelism.

A rank's queries are cut into segments, the parts of one document in one chunk of a sequence: without context
parallelism a sequence is one chunk, with it a rank has two of 2n (Megatron's load-balanced split). A segment attends to
its document's tokens up to its own end. Its keys begin before its queries where a chunk begins within a document.

The bounds of the segments take the place of Megatron's attention mask, through every pipeline stage: one int32 tensor
[2, m + 1]; segment i has the queries bounds[0, i] to bounds[0, i + 1] of the rank's chunks, sequence by sequence, and
the keys bounds[1, i] to bounds[1, i + 1] of the sequences up to the ends of these chunks. Keys of earlier documents, to
which no query attends, are a segment without queries: so the keys' number is known without a look at the bounds, which
would synchronize with the device.

Rotary positions count within the sequence and are not reset at document boundaries: attention depends on differences
of positions only, which are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.parallel_state import get_context_parallel_rank, get_context_parallel_world_size
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, distributed

from pretrainkit.megatron.window_attention import attend_causally


def with_document_bounds(data_step: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's data step, with the bounds of each microbatch's segments as its attention mask.

    They are computed on the CPU before the batch is copied to the device, which avoids a device synchronization.
    """

    def data_step_with_bounds(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        batch = next(batches)
        sample = batch[0] if isinstance(batch, tuple) else batch
        sample.pop("attention_mask", None)  # which the step would cut for context parallelism
        position_ids = sample["position_ids"]
        bounds = segment_bounds(position_ids, get_context_parallel_rank(), get_context_parallel_world_size())
        output = data_step(iter([batch]), *args, **kwargs)
        output["attention_mask"] = bounds.cuda(non_blocking=True)
        return output

    return data_step_with_bounds


def segment_bounds(position_ids: Tensor, rank: int = 0, num_ranks: int = 1) -> Tensor:
    """Bounds [2, m + 1], int32, of a rank's segments of position ids [b, S], which are 0 where a document starts.

    With several ranks, S is a multiple of twice their number.
    """
    length = position_ids.size(1)
    chunk = length // (2 * num_ranks) if num_ranks > 1 else length
    queries, keys = [0], [0]
    for row in position_ids.numpy():
        begins = (row == 0).nonzero()[0]
        for number in chunks_of(rank, num_ranks):
            first, end = number * chunk, (number + 1) * chunk
            document = int(begins[begins <= first][-1])
            inner = begins[(begins > first) & (begins < end)].tolist()
            ends = [*([(first, document)] if document else []), *((at, at) for at in (*inner, end))]
            query, key = queries[-1] - first, keys[-1]
            queries += [query + at for at, _ in ends]
            keys += [key + at for _, at in ends]
    return torch.tensor([queries, keys], dtype=torch.int32)


def chunks_of(rank: int, num_ranks: int) -> tuple[int, ...]:
    """The numbers of a rank's chunks."""
    return (rank, 2 * num_ranks - 1 - rank) if num_ranks > 1 else (0,)


def document_positions(query: Tensor, bounds: Tensor) -> Tensor:
    """The positions [s, b] of a rank's queries [s, b, h, d] in their documents, by the bounds of its segments."""
    length, batch = query.shape[:2]
    queries, keys = bounds.diff().long()
    # A segment's queries are the last of its keys, which begin where its document does.
    first = keys - queries - bounds[0, :-1]
    by_query = torch.repeat_interleave(first, queries, output_size=length * batch)
    return (by_query + torch.arange(length * batch, device=bounds.device)).view(batch, length).t()


def attend_within_documents(
    query: Tensor,  # [s, b, h, d]: s tokens on this rank
    key: Tensor,  # [s, b, g, d], h a multiple of g
    value: Tensor,  # [s, b, g, d]
    bounds: Tensor,  # [2, m + 1], int32, on the same device
    group: distributed.ProcessGroup,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [h]
) -> Tensor:  # [s, b, h * d]
    """Each token attends to the tokens of its own document up to itself, with a window to no more than so many.

    `group`: the context-parallel ranks.
    """
    length, batch = query.shape[:2]
    if group.size() > 1:
        key, value = _up_to_chunks(key, value, group)
    q, k, v = (part.transpose(0, 1).flatten(0, 1) for part in (query, key, value))  # [b * tokens, heads, d]
    is_plain = not window and not softcap and sinks is None
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and is_plain:
        out = _flash(q, k, v, bounds, length * group.size(), scale)
    else:
        out = _one_by_one(q, k, v, bounds, scale, window, softcap, sinks)
    return out.unflatten(0, (batch, length)).transpose(0, 1).flatten(2)


def _up_to_chunks(key: Tensor, value: Tensor, group: distributed.ProcessGroup) -> tuple[Tensor, ...]:
    """Keys and values [t, b, g, d] of a sequence up to the end of the rank's first chunk, then of its second."""
    gathered = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=group)
    by_rank = gathered.chunk(2 * group.size())
    in_order = [*by_rank[::2], *by_rank[::-2]]
    ends = (number + 1 for number in chunks_of(group.rank(), group.size()))
    return torch.cat([part for end in ends for part in in_order[:end]]).chunk(2, -1)


def _flash(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float | None) -> Tensor:
    """All segments in one call of the flash kernel; `longest` is no less than the longest, which need not be known."""
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, *bounds, longest, longest, 0.0, True, False, scale=scale
    )[0]
    return out


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *settings: Any) -> Tensor:
    """One call per segment, for what the flash kernel doesn't support: fp32 and CPU, and the settings."""
    queries, keys = bounds.diff().tolist()
    outs = []
    for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys), strict=True):  # [l, heads, d]
        if not len(q):
            continue
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))  # [1, heads, l, d]
        outs.append(attend_causally(q, k, v, *settings).squeeze(0).transpose(0, 1))
    return torch.cat(outs)
