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
        return tensors_of(list(batch.values()))
    return [tensor for value in batch for tensor in tensors_of(value)] if isinstance(batch, (list, tuple)) else []


def num_bytes(batch: Any) -> int:
    """Memory of a batch's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(batch))


def token_ids(batch: Any) -> torch.Tensor | None:
    """[b, s] token ids, if it is a batch of them."""
    for name in IDS if isinstance(batch, Mapping) else ():
        ids: Any = batch.get(name)
        if torch.is_tensor(ids) and ids.dim() == 2 and not ids.is_floating_point():
            return ids
    return None


def real_tokens(batch: Any) -> torch.Tensor | None:
    """[b, s] bool: which tokens are no padding; None when it isn't a batch of tokens."""
    ids = token_ids(batch)
    if ids is None:
        return None
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if torch.is_tensor(mask) and mask.shape == ids.shape:
        return mask.bool()
    if torch.is_tensor(labels) and labels.shape == ids.shape:
        # Only ignored labels that go on to the end of the row are padding; prompts are ignored, too.
        return (labels != IGNORED_LABEL).flip(1).cumsum(1).flip(1) > 0
    return torch.ones_like(ids, dtype=torch.bool)


def num_samples(batch: Any) -> int:
    """Rows of the batch: the first dimension of its first tensor."""
    return next((int(tensor.shape[0]) for tensor in tensors_of(batch) if tensor.dim()), 1)


def measure(batch: Any) -> dict[str, Any]:
    """Samples, tokens, real tokens, shape, and the rows' real lengths of one batch."""
    ids, real = token_ids(batch), real_tokens(batch)
    if ids is None or real is None:
        shape = next((list(tensor.shape) for tensor in tensors_of(batch)), [])
        return {"samples": num_samples(batch), "tokens": 0, "real_tokens": 0, "shape": shape, "lengths": []}
    lengths = real.sum(1).tolist()
    amounts = {"samples": len(ids), "tokens": ids.numel(), "real_tokens": int(sum(lengths))}
    return {**amounts, "shape": list(ids.shape), "lengths": lengths}


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


def can_be_packed(several: list[Any]) -> bool:
    """Whether there is padding, and nothing but tensors [b, s] that belong to tokens."""
    real = [mask for mask in map(real_tokens, several) if mask is not None]
    if len(real) < len(several) or all(bool(mask.all()) for mask in real):
        return False
    return all(
        tensor.shape == mask.shape for batch, mask in zip(several, real, strict=True) for tensor in tensors_of(batch)
    )


def packed(several: list[Any], width: int) -> list[Any]:
    """The real tokens of some batches one after the other, in as many batches of full rows.

    Args:
        several: batches that can be packed.
        width: of a row; less where a batch has fewer real tokens. The last row is filled up with the first tokens.
    """
    real = [real_tokens(batch) for batch in several]
    total, count = sum(int(mask.sum()) for mask in real if mask is not None), len(several)
    width = max(1, min(width, total // count))
    taken = torch.arange(max(count, round(total / width)) * width) % total
    columns = {
        name: torch.cat([batch[name][mask] for batch, mask in zip(several, real, strict=True)])[taken].reshape(
            -1, width
        )
        for name in several[0]
    }
    parts = {name: torch.tensor_split(rows, count) for name, rows in columns.items()}
    return [_like(several[0], {name: part[number] for name, part in parts.items()}) for number in range(count)]


def merged(batches: list[Any]) -> Any:
    """Several batches as one, along the first dimension; rows of other widths are padded at the right."""
    first = batches[0]
    if torch.is_tensor(first):
        return _concatenated(batches, 0)
    if isinstance(first, Mapping):
        parts = {name: [batch[name] for batch in batches] for name in first}
        if torch.is_tensor(first.get("labels")):
            parts["labels"] = [_concatenated(parts["labels"], IGNORED_LABEL)]
        return _like(first, {name: merged(values) for name, values in parts.items()})
    if isinstance(first, (list, tuple)):
        return type(first)(merged(list(parts)) for parts in zip(*batches, strict=True))
    return first


def can_be_merged(batches: list[Any]) -> bool:
    """Whether every tensor has a first dimension that counts samples."""
    return all(
        tensor.dim() > 0 and tensor.shape[0] == num_samples(batch) for batch in batches for tensor in tensors_of(batch)
    )


def _concatenated(tensors: list[torch.Tensor], fill: int) -> torch.Tensor:
    if tensors[0].dim() == 2:
        width = max(tensor.shape[1] for tensor in tensors)
        tensors = [F.pad(tensor, (0, width - tensor.shape[1]), value=fill) for tensor in tensors]
    return torch.cat(tensors)
