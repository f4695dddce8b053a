"""A family's weight table spelled out for one model: every tensor by name, both sides, with its shape."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.models.family import Layout, Weight
from pretrainkit.models.registry import family_named


@dataclass(frozen=True)
class TensorMapping:
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
        return math.prod(self.megatron_shape)

    def __str__(self) -> str:
        return " + ".join(self.hf)


def tensor_mappings(shape: ModelShape) -> list[TensorMapping]:
    """All tensors of a model, in the order of the Hugging Face model: embedding, layer by layer, head."""
    mappings: list[TensorMapping] = []
    layered: list[Weight] = []
    for weight in family_named(shape.family).weights(shape):
        if weight.per_layer:
            layered.append(weight)
            continue
        mappings += _layers(layered, shape)
        layered = []
        mappings.append(TensorMapping(weight))
    return mappings + _layers(layered, shape)


def _layers(weights: Iterable[Weight], shape: ModelShape) -> list[TensorMapping]:
    weights = list(weights)
    return [
        TensorMapping(weight, layer, expert)
        for layer in range(shape.num_layers if weights else 0)
        for weight in weights
        for expert in (range(shape.num_experts) if weight.per_expert else (None,))
    ]


def check_names(mappings: Iterable[TensorMapping], found: Iterable[str], where: str) -> None:
    """Raise RequestError unless `found` are exactly the Hugging Face names of the mappings."""
    wanted, present = {name for mapping in mappings for name in mapping.hf}, set(found)
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
