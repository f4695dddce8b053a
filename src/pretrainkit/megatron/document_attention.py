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
import torch.nn.functional as F
from megatron.core.parallel_state import get_context_parallel_rank, get_context_parallel_world_size
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, distributed

from pretrainkit.megatron.attention_kernels import AttentionBlock, CausalFlash, Segments, attend
from pretrainkit.megatron.window_attention import attend_causally, has_flash


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
    chunk = length
    if group.size() > 1:
        chunk //= 2
        key, value = (torch.cat(parts) for parts in zip(*keys_of_chunks(key, value, group), strict=True))
    q, k, v = (part.transpose(0, 1).flatten(0, 1) for part in (query, key, value))  # [b * tokens, heads, d]
    if has_flash(query) and not softcap:
        out = _flash(q, k, v, Segments(bounds, chunk, length * group.size()), scale, window, sinks)
    else:
        out = _one_by_one(q, k, v, bounds, scale, window, softcap, sinks)
    return out.unflatten(0, (batch, length)).transpose(0, 1).flatten(2)


def keys_of_chunks(
    key: Tensor, value: Tensor, group: distributed.ProcessGroup, window: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [t, b, g, d] of a sequence up to the end of each of the rank's two chunks.

    With a window they begin with those of the chunk's first query, no earlier.
    """
    gathered = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=group)
    by_rank = gathered.chunk(2 * group.size())
    in_order = [*by_rank[::2], *by_rank[::-2]]
    found = []
    for number in chunks_of(group.rank(), group.size()):
        size = key.size(0) // 2
        first = max(number * size - window + 1, 0) if window else 0
        up_to_end = torch.cat(in_order[first // size : number + 1])  # a copy, which keeps no others' memory
        found.append(up_to_end[first % size :].split(key.size(-1), -1))
    return found


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float | None,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    """All segments in one call of the flash kernel, whose values are as large as keys."""
    size = value.size(-1)
    if size != key.size(-1):
        value = F.pad(value, (0, key.size(-1) - size))
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))  # [1, heads, b * tokens, d]
    out = attend(AttentionBlock(q, k, v, True, scale), CausalFlash(window, segments), sinks)
    return out.squeeze(0).transpose(0, 1)[..., :size]


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
