"""A family's weight table spelled out for one model: every tensor by name, both sides, with its shape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import CheckpointError, PretrainkitError
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
        """Shapes of the parts that Megatron's tensor is made of; each is a Hugging Face tensor, unless it is fused."""
        return self.weight.shapes

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the Hugging Face tensors."""
        if self.weight.is_scalar:
            return ((),)
        if experts := self.weight.num_stacked:
            shape = self.megatron_shape
            return ((experts, *(reversed(shape) if self.weight.is_transposed else shape)),)
        count = self.weight.num_fused
        first = sum(shape[0] for shape in self.shapes[:count]), *self.shapes[0][1:]
        return (first, *self.shapes[count:])

    @property
    def num_tensors(self) -> int:
        """Number of Hugging Face tensors; one that is for all experts counts as the first one's."""
        return 0 if self.weight.num_stacked and self.expert else len(self.hf)

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts, for people."""
        count = len(self.shapes)
        if not self.weight.is_fused and not self.weight.num_stacked:
            return self.hf
        whole = self.hf[0] if self.expert is None else f"{self.hf[0]}[{self.expert}]"
        count -= len(self.hf) - 1
        return (*(f"{whole} (part {number} of {count})" for number in range(1, count + 1)), *self.hf[1:])

    @property
    def megatron_shape(self) -> tuple[int, ...]:
        """Shape of the Megatron tensor without tensor parallelism and vocabulary padding."""
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.megatron_shape)

    def __str__(self) -> str:
        """The Megatron tensor's name, for people."""
        expert = "" if self.expert is None else f" (expert {self.expert})"
        return self.weight.megatron.format(layer=self.layer) + expert


def tensor_mappings(shape: ModelShape) -> list[TensorMapping]:
    """All tensors of a model, in the order of the Hugging Face model: embedding, layer by layer, head."""
    return [
        TensorMapping(weight, layer, expert)
        for per_layer, rows in itertools.groupby(family_named(shape.family).weights(shape), lambda row: row.per_layer)
        for layer, weight in itertools.product(range(shape.num_layers) if per_layer else [None], rows)
        if weight.is_in(layer)
        for expert in (range(shape.num_experts) if weight.per_expert else [None])
    ]


def check_names(
    wanted: Collection[str], found: Collection[str], where: object, error: type[PretrainkitError] = CheckpointError
) -> None:
    """Raise `error` unless a checkpoint has exactly the tensors that are wanted."""
    missing, unknown = (sorted(set(a) - set(b)) for a, b in ((wanted, found), (found, wanted)))
    problems = [
        f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}: {', '.join(names[:8])}"
        + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        for what, names in (("missing", missing), ("not known", unknown))
        if names
    ]
    if problems:
        needed = "exactly the tensors of the architecture that config.json names"
        raise error("; ".join(problems), where=str(where), needed=needed)


def check_tensors(
    tensors: Mapping[str, Any],
    shapes: Collection[tuple[int, ...]],
    where: object,
    error: type[PretrainkitError] = CheckpointError,
) -> None:
    """Raise `error` unless the tensors that form one Megatron tensor, by name, have one dtype and these shapes."""
    dtypes = sorted({str(tensor.dtype) for tensor in tensors.values()})
    if len(dtypes) > 1:
        raise error(
            f"{' + '.join(tensors)} have different dtypes: {', '.join(dtypes)}",
            where=str(where),
            needed="one dtype, since Megatron keeps them in one tensor",
        )
    for (name, tensor), shape in zip(tensors.items(), shapes, strict=True):
        if tuple(tensor.shape) != shape:
            raise error(
                f"tensor {name} has shape {list(tensor.shape)}",
                where=str(where),
                needed=f"{list(shape)}, which follows from config.json",
            )
