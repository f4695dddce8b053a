"""How a model is cut over tensor, pipeline and expert parallel ranks, and whether it can be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError


@dataclass(frozen=True)
class Parallelism:
    """Parallel sizes of a checkpoint that is stored by rank."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage; None: as many as the others."""
    last_stage_layers: int | None = None

    def check(self, shape: ModelShape) -> None:
        """Raise RequestError, with the sizes that would work, when the model can't be cut like this."""
        RequestError.raise_all(self.problems(shape))

    def problems(self, shape: ModelShape) -> list[RequestError]:
        """Why the model can't be cut like this."""
        wide = shape.features.global_attention
        counts = {
            "attention heads": shape.num_attention_heads,
            "key/value heads": shape.num_query_groups,
            "feed-forward size": shape.ffn_hidden_size if shape.has_dense_layers else 0,
            "expert feed-forward size": shape.expert_ffn_hidden_size,
            "shared expert feed-forward size": shape.shared_expert_ffn_hidden_size,
            "key/value heads of layers without a window": wide.num_query_groups if wide else 0,
            "key heads of gated delta nets": shape.features.delta_net.num_key_heads if shape.features.delta_net else 0,
        }
        problems = _indivisible("tensor parallel size", self.tensor, counts)
        if shape.num_experts:
            problems += _indivisible("expert parallel size", self.expert, {"experts": shape.num_experts})
        elif self.expert != 1:
            problems.append(RequestError("the model has no experts", where="expert parallel size", needed="1"))
        try:
            self.stages(shape.num_layers)
        except RequestError as error:
            problems.append(error)
        return problems

    def stages(self, num_layers: int) -> list[range]:
        """Layers of each pipeline stage. Raises RequestError unless they sum up to all layers."""
        if self.pipeline < 1:
            raise RequestError(f"{self.pipeline}", where="pipeline parallel size", needed="1 or more")
        counts: list[int | None] = [None] * self.pipeline
        if self.first_stage_layers is not None:
            counts[0] = self.first_stage_layers
        if self.last_stage_layers is not None:
            counts[-1] = self.last_stage_layers
        rest = num_layers - sum(count for count in counts if count is not None)
        open_stages = counts.count(None)
        if rest < open_stages or (open_stages == 0 and rest) or (open_stages and rest % open_stages):
            raise RequestError(
                f"{num_layers} layers can't be divided over {self.pipeline} stages"
                + (f" with {rest} left for {open_stages} of them" if open_stages != self.pipeline else ""),
                where="pipeline parallel size",
                needed=f"{_divisors(num_layers)}, or other numbers of layers in the first and last stage",
                action="set --target-first-stage-layers and --target-last-stage-layers",
            )
        stages, first = [], 0
        for count in counts:
            size = rest // open_stages if count is None else count
            stages.append(range(first, first + size))
            first += size
        return stages


def _indivisible(where: str, size: int, counts: Mapping[str, int]) -> list[RequestError]:
    """The problem, if there is one, of dividing each count by a parallel size."""
    wrong = [f"{count} {name}" for name, count in counts.items() if count and (size < 1 or count % size)]
    found = f"{' and '.join(wrong)} can't be divided by {size}"
    return [RequestError(found, where=where, needed=_divisors(math.gcd(*counts.values())))] if wrong else []


def _divisors(number: int) -> str:
    return f"one of {', '.join(str(size) for size in range(1, number + 1) if number % size == 0)}"
