"""A family's weight table spelled out for one model: every tensor by name, both sides, with its shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.family import Layout, Weight
from pretrainkit.models.registry import family_named


@dataclass(frozen=True)
class Entry:
    """One Megatron tensor and the Hugging Face tensors that it is made of."""

    weight: Weight
    layer: int | None = None
    expert: int | None = None

    @property
    def layout(self) -> Layout:
        return self.weight.layout

    @property
    def hf(self) -> tuple[str, ...]:
        """Names of the Hugging Face tensors."""
        return tuple(name.format(layer=self.layer, expert=self.expert) for name in self.weight.hf)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the Hugging Face tensors."""
        return self.weight.shapes

    @property
    def megatron_shape(self) -> tuple[int, ...]:
        """Shape of the Megatron tensor without tensor parallelism and vocabulary padding."""
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.megatron_shape:
            count *= size
        return count

    def __str__(self) -> str:
        return " + ".join(self.hf)


def expand(shape: ModelShape) -> list[Entry]:
    """All tensors of a model, in the order of the Hugging Face model: embedding, layer by layer, head."""
    entries: list[Entry] = []
    layered: list[Weight] = []
    for weight in family_named(shape.family).weights(shape):
        if weight.per_layer:
            layered.append(weight)
            continue
        entries += _layers(layered, shape)
        layered = []
        entries.append(Entry(weight))
    return entries + _layers(layered, shape)


def _layers(weights: Iterable[Weight], shape: ModelShape) -> list[Entry]:
    weights = list(weights)
    return [
        Entry(weight, layer, expert)
        for layer in range(shape.num_layers if weights else 0)
        for weight in weights
        for expert in (range(shape.num_experts) if weight.per_expert else (None,))
    ]


@dataclass(frozen=True)
class MegatronContent:
    """What a Megatron checkpoint is to hold, in whatever format."""

    entries: Sequence[Entry]
    dtypes: Mapping[Entry, torch.dtype]
    shape: ModelShape
    common: Mapping[str, Any]
    """What lies beside the weights: arguments, iteration."""
    padded_rows: int
    """Rows of the embedding, with its padding."""
    num_parts: int
    """Parts that workers write side by side."""

    def parts(self) -> list[list[Entry]]:
        """The entries in at most `num_parts` runs of about equal bytes, in order."""
        return balance(self.entries, self.dtypes, self.num_parts)


def balance(entries: Sequence[Entry], dtypes: Mapping[Entry, torch.dtype], num_files: int) -> list[list[Entry]]:
    """Entries split into at most `num_files` runs of about equal bytes, in order."""
    total = sum(entry.numel * dtypes[entry].itemsize for entry in entries)
    parts: list[list[Entry]] = [[] for _ in range(min(num_files, len(entries)))]
    done = 0
    for entry in entries:
        parts[min(done * len(parts) // max(total, 1), len(parts) - 1)].append(entry)
        done += entry.numel * dtypes[entry].itemsize
    return [part for part in parts if part]


def check_names(entries: Iterable[Entry], found: Iterable[str], where: str) -> None:
    """Raise RequestError unless `found` are exactly the Hugging Face names of the entries."""
    wanted, present = {name for entry in entries for name in entry.hf}, set(found)
    problems = [
        f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}: {_some(names)}"
        for what, names in (("missing", wanted - present), ("not known", present - wanted))
        if names
    ]
    if problems:
        raise RequestError(
            "; ".join(problems), where=where, needed="exactly the tensors of the architecture that config.json names"
        )


def _some(names: Iterable[str], limit: int = 8) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more
