"""What a batch holds, and the same samples arranged otherwise: packed without padding, or in larger micro batches.

A batch is what a DataLoader yields: tensors in dicts, lists and tuples. Token batches are dicts (or objects
like them) with `input_ids` or `tokens` [b, s]; padding is where `attention_mask` is 0, or without one where labels are
ignored (-100) from some position on to the end of the row.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

IDS = ("input_ids", "tokens")
IGNORED_LABEL = -100
DRAWS = 300
"""Choices among which the most typical one is taken."""


def copied(batch: Any) -> Any:
    """New containers around the same tensors: a loop may take things out of the ones it gets."""
    if isinstance(batch, dict) or (isinstance(batch, Mapping) and hasattr(batch, "data")):
        return _like(batch, {name: copied(value) for name, value in batch.items()})
    if type(batch) in (list, tuple):
        return type(batch)(copied(value) for value in batch)
    return batch


def _like(batch: Any, items: dict[str, Any]) -> Any:
    try:
        return type(batch)(items)
    except TypeError:
        return items


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """All tensors in a batch."""
    if torch.is_tensor(batch):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for value in batch.values() for tensor in tensors_of(value)]
    if isinstance(batch, (list, tuple)):
        return [tensor for value in batch for tensor in tensors_of(value)]
    return []


def num_bytes(batch: Any) -> int:
    """Memory of a batch's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(batch))


def token_ids(batch: Any) -> torch.Tensor | None:
    """[b, s] token ids, if it is a batch of them."""
    if not isinstance(batch, Mapping):
        return None
    for name in IDS:
        ids: Any = batch.get(name)
        if torch.is_tensor(ids) and ids.dim() == 2 and not ids.is_floating_point():
            return ids
    return None


def real_tokens(batch: Any) -> torch.Tensor | None:
    """[b, s] bool: which tokens are no padding; None when it isn't a batch of tokens."""
    ids = token_ids(batch)
    if ids is None:
        return None
    mask, labels = _of_tokens(batch, "attention_mask"), _of_tokens(batch, "labels")
    if mask is not None:
        return mask.bool()
    if labels is not None:
        learnt = labels != IGNORED_LABEL
        # Only ignored labels that go on to the end of the row are padding; prompts are ignored, too.
        return learnt.flip(1).cumsum(1).flip(1) > 0
    return torch.ones_like(ids, dtype=torch.bool)


def num_samples(batch: Any) -> int:
    """Rows of the batch: the first dimension of its first tensor."""
    for tensor in tensors_of(batch):
        if tensor.dim():
            return int(tensor.shape[0])
    return 1


def special_tokens(batch: Any, *, eos_id: int | None, bos_id: int | None) -> dict[str, int]:
    """How documents end and begin in one batch: counts of rows and of EOS among the real tokens; empty without ids.

    ended_rows, unended_rows: rows with padding, whose document is there to its end, with and without EOS as last token.
    ends, masked_ends: EOS tokens, and those that the loss ignores. double_bos: rows that begin with two BOS.
    """
    # By the attention mask alone: labels may hide the tokens that are asked for.
    ids, attended, labels = token_ids(batch), _of_tokens(batch, "attention_mask"), _of_tokens(batch, "labels")
    if ids is None or attended is None:
        return {}
    mask = attended.bool()
    counts = {"ended_rows": 0, "unended_rows": 0, "ends": 0, "masked_ends": 0, "double_bos": 0}
    if eos_id is not None:
        is_end = (ids == eos_id) & mask
        for row, row_mask in zip(is_end.tolist(), mask.tolist(), strict=True):
            if not all(row_mask) and any(row_mask):
                last = len(row_mask) - 1 - row_mask[::-1].index(True)
                counts["ended_rows" if row[last] else "unended_rows"] += 1
        if labels is not None:
            counts |= {"ends": int(is_end.sum()), "masked_ends": int((is_end & (labels == IGNORED_LABEL)).sum())}
    if bos_id is not None and bos_id != eos_id and ids.shape[1] > 1:
        first = mask.int().argmax(1)  # padding may be at the left
        second = (first + 1).clamp(max=ids.shape[1] - 1)
        rows = torch.arange(len(ids), device=ids.device)
        counts["double_bos"] = int(((ids[rows, first] == bos_id) & (ids[rows, second] == bos_id)).sum())
    return counts


def _of_tokens(batch: Any, name: str) -> torch.Tensor | None:
    """The tensor [b, s] of a name that belongs to the batch's token ids, if it has one."""
    ids = token_ids(batch)
    value: Any = batch.get(name) if ids is not None else None
    return value if ids is not None and torch.is_tensor(value) and value.shape == ids.shape else None


def measure(batch: Any) -> dict[str, Any]:
    """Samples, tokens, real tokens, shape, and the rows' real lengths of one batch."""
    ids, real = token_ids(batch), real_tokens(batch)
    if ids is None or real is None:
        shape = next((list(tensor.shape) for tensor in tensors_of(batch)), [])
        return {"samples": num_samples(batch), "tokens": 0, "real_tokens": 0, "shape": shape, "lengths": []}
    lengths = real.sum(1).tolist()
    return {
        "samples": int(ids.shape[0]),
        "tokens": ids.numel(),
        "real_tokens": int(sum(lengths)),
        "shape": list(ids.shape),
        "lengths": lengths,
    }


def mean_work(seen: list[Any]) -> dict[str, float]:
    """Mean samples, tokens and real tokens of a batch of several."""
    facts = [measure(batch) for batch in seen]
    names = ("samples", "tokens", "real_tokens")
    return {name: sum(fact[name] for fact in facts) / max(len(facts), 1) for name in names}


def typical(seen: list[Any], count: int) -> list[Any]:
    """So many of the batches that together have about the size and the padding of all."""
    work = [(item["tokens"] or item["samples"], item["real_tokens"]) for item in map(measure, seen)]
    tokens, real = (sum(amounts) / max(len(work), 1) for amounts in zip(*work, strict=True))

    def distance(chosen: list[int]) -> float:
        own_tokens, own_real = (sum(work[index][part] for index in chosen) / count for part in (0, 1))
        return abs(own_tokens - tokens) / tokens + abs(own_real / own_tokens - real / tokens)

    draw = random.Random(0)
    drawn = [draw.sample(range(len(seen)), count) for _ in range(DRAWS)]
    return [seen[index] for index in min(drawn, key=distance)]


def can_be_packed(batch: Any) -> bool:
    """Whether the batch has padding, and nothing but tensors [b, s] that belong to its tokens."""
    ids, real = token_ids(batch), real_tokens(batch)
    if ids is None or real is None or bool(real.all()):
        return False
    return all(tensor.shape == ids.shape for tensor in tensors_of(batch))


def packed(batch: Any) -> Any:
    """The batch's real tokens one after the other in full rows of the same width; what is left over is dropped."""
    ids, real = token_ids(batch), real_tokens(batch)
    assert ids is not None and real is not None
    total = int(real.sum())
    width = min(ids.shape[1], total)
    rows = total // width

    def arrange(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[real][: rows * width].reshape(rows, width)

    return _like(batch, {name: arrange(value) for name, value in batch.items()})


def merged(batches: list[Any]) -> Any:
    """Several batches as one, along the first dimension; rows of other widths are padded at the right."""
    first = batches[0]
    if torch.is_tensor(first):
        return _concatenated(batches, 0)
    if isinstance(first, Mapping):
        values = {
            name: _concatenated([batch[name] for batch in batches], IGNORED_LABEL if name == "labels" else 0)
            if torch.is_tensor(value)
            else merged([batch[name] for batch in batches])
            for name, value in first.items()
        }
        return _like(first, values)
    if isinstance(first, (list, tuple)):
        return type(first)(merged(list(parts)) for parts in zip(*batches, strict=True))
    return first


def can_be_merged(batches: list[Any]) -> bool:
    """Whether every tensor has a first dimension that counts samples."""
    rows = [num_samples(batch) for batch in batches]
    return all(
        tensor.dim() > 0 and tensor.shape[0] == count
        for batch, count in zip(batches, rows, strict=True)
        for tensor in tensors_of(batch)
    )


def _concatenated(tensors: list[torch.Tensor], fill: int) -> torch.Tensor:
    if tensors[0].dim() == 2:
        width = max(tensor.shape[1] for tensor in tensors)
        tensors = [F.pad(tensor, (0, width - tensor.shape[1]), value=fill) for tensor in tensors]
    return torch.cat(tensors)
