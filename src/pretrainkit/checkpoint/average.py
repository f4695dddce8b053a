"""A weighted average of checkpoints, read as if it were one of them.

Per element, with the parents x_1 ... x_n in the order of the merge and shares w that add up to 1:

    y = (...((w_1 * x_1) + w_2 * x_2) + ...) + w_n * x_n

Every product and every sum is rounded to fp32 (fp64 for fp64 weights), whatever the parents' dtype; `y` is rounded once
to the dtype that is written. So a result depends on neither the format nor the layout of a parent, nor on how the work
is divided.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pretrainkit.checkpoint.lazy_tensor import LazyTensor
from pretrainkit.checkpoint.mapping import TensorMapping
from pretrainkit.errors import RequestError

if TYPE_CHECKING:
    from pretrainkit.checkpoint.open import DetectedCheckpoint, WeightReader


@dataclass(frozen=True)
class Parent:
    """A checkpoint that goes into an average."""

    checkpoint: DetectedCheckpoint
    name: str
    """Name of its folder."""
    step: int | None
    """Optimizer step, as the folder's name states it."""
    weight: float
    """Its share of the average."""


@dataclass(frozen=True)
class Average:
    """A weighted average of checkpoints."""

    parents: tuple[Parent, ...]
    """In the order in which they are added."""
    rule: str
    """How the weights came about, for people."""
    dtype: torch.dtype | None = None
    """What the average is rounded to; None: the parents' dtype."""


class AverageReader:
    """Reads the average of several checkpoints, some rows at a time.

    Raises RequestError when their dtypes differ.
    """

    def __init__(self, readers: Sequence[WeightReader], average: Average) -> None:
        self._readers = readers
        self._weights = [parent.weight for parent in average.parents]
        self.dtypes: Mapping[TensorMapping, torch.dtype] = readers[-1].dtypes
        # The average of a run's checkpoints has the run's arguments, and is of none of its iterations.
        self.run_state: dict[str, Any] = {
            name: value for name, value in readers[-1].run_state.items() if name != "iteration"
        }
        for reader, parent in zip(readers, average.parents, strict=True):
            _check_dtypes(reader.dtypes, self.dtypes, parent, average.parents[-1])
        parents = ", ".join(f"{parent.weight:.6g} x {parent.name}" for parent in average.parents)
        notes = (note for reader in readers for note in reader.notes)
        self.notes: list[str] = [f"average in fp32 ({average.rule}): {parents}", *dict.fromkeys(notes)]

    def read(self, mapping: TensorMapping) -> list[LazyTensor]:
        """The Hugging Face tensors of a mapping."""
        values = zip(*(reader.read(mapping) for reader in self._readers), strict=True)
        return [weighted_sum(parts, self._weights).to(self.dtypes[mapping]) for parts in values]

    def padding(self, mapping: TensorMapping) -> LazyTensor | None:
        """The padding rows of the last checkpoint's vocabulary."""
        return self._readers[-1].padding(mapping)


def _check_dtypes(
    found: Mapping[TensorMapping, torch.dtype],
    wanted: Mapping[TensorMapping, torch.dtype],
    parent: Parent,
    last: Parent,
) -> None:
    different = [mapping for mapping, dtype in wanted.items() if found[mapping] != dtype]
    if different:
        first = different[0]
        dtypes = [str(dtypes[first]).removeprefix("torch.") for dtypes in (found, wanted)]
        raise RequestError(
            f"{len(different)} tensors of another dtype than in {last.name}: {first} is {' and not '.join(dtypes)}",
            where=str(parent.checkpoint.weights),
            needed="checkpoints of one dtype",
            action=f"cast it first: convert_checkpoint.py --dtype {dtypes[1]}",
        )


def weighted_sum(parts: Sequence[LazyTensor], weights: Sequence[float]) -> LazyTensor:
    """The sum of tensors of one shape, each times its weight, in fp32 (fp64 for fp64 tensors)."""
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    factors = [torch.tensor(weight, dtype=dtype) for weight in weights]

    def rows(first: int, count: int) -> torch.Tensor:
        total = parts[0].rows(first, count).tensor().to(dtype) * factors[0]
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            # Not add_(x, alpha=weight): it rounds once or twice, depending on the processor and the position.
            total += part.rows(first, count).tensor().to(dtype) * factor
        return total

    return LazyTensor.computed(parts[0].shape, dtype, rows)


def normalised(weights: Sequence[float], num_parents: int) -> list[float]:
    """The weights divided by their sum. Raises RequestError unless there is a positive one for each parent."""
    if len(weights) != num_parents:
        raise RequestError(
            f"{len(weights)} weights for {num_parents} checkpoints", where="--weights", needed="one for each, in order"
        )
    if wrong := [f"{weight:g}" for weight in weights if not (math.isfinite(weight) and weight > 0)]:
        raise RequestError(", ".join(wrong), where="--weights", needed="finite numbers above 0")
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def ema_weights(steps: Sequence[int], decay: float, interval: int) -> list[float]:
    """The shares of checkpoints at some steps, ascending, in their exponential moving average.

    The average begins as the first checkpoint, and a checkpoint `k` steps after the one before it takes
    1 - decay ** (k / interval) of it: e_1 = x_1, e_i = d_i * e_(i-1) + (1 - d_i) * x_i with
    d_i = decay ** ((s_i - s_(i-1)) / interval).
    """
    if not 0 < decay < 1:
        raise RequestError(f"{decay:g}", where="--ema-decay", needed="a number between 0 and 1")
    if interval < 1:
        raise RequestError(f"{interval}", where="--ema-interval", needed="1 or more steps")
    shares = [1.0]
    for previous, step in itertools.pairwise(steps):
        kept = decay ** ((step - previous) / interval)
        shares = [*(share * kept for share in shares), 1 - kept]
    return shares
