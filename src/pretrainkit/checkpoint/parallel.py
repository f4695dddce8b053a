"""How a model is cut over tensor, pipeline and expert parallel ranks, and whether it can be."""

from __future__ import annotations

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
        problems = [problem for problem in (self._tensor_problem(shape), self._expert_problem(shape)) if problem]
        try:
            self.stages(shape.num_layers)
        except RequestError as error:
            problems.append(error)
        if problems:
            raise RequestError.of_all(problems)

    def _tensor_problem(self, shape: ModelShape) -> RequestError | None:
        counts = {
            "attention heads": shape.num_attention_heads,
            "key/value heads": shape.num_query_groups,
        }
        if shape.num_experts:
            counts["expert feed-forward size"] = shape.expert_ffn_hidden_size
        else:
            counts["feed-forward size"] = shape.ffn_hidden_size
        if shape.shared_expert_ffn_hidden_size:
            counts["shared expert feed-forward size"] = shape.shared_expert_ffn_hidden_size
        wrong = [f"{count} {name}" for name, count in counts.items() if self.tensor < 1 or count % self.tensor]
        if not wrong:
            return None
        legal = [size for size in range(1, 129) if not any(count % size for count in counts.values())]
        return RequestError(
            f"{' and '.join(wrong)} can't be divided by {self.tensor}",
            where="tensor parallel size",
            needed=f"one of {', '.join(map(str, legal))}",
        )

    def _expert_problem(self, shape: ModelShape) -> RequestError | None:
        if self.expert == 1:
            return None
        if not shape.num_experts:
            return RequestError("the model has no experts", where="expert parallel size", needed="1")
        if self.expert < 1 or shape.num_experts % self.expert:
            legal = [size for size in range(1, shape.num_experts + 1) if shape.num_experts % size == 0]
            return RequestError(
                f"{shape.num_experts} experts can't be divided by {self.expert}",
                where="expert parallel size",
                needed=f"one of {', '.join(map(str, legal))}",
            )
        return None

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
            legal = [size for size in range(1, num_layers + 1) if num_layers % size == 0]
            raise RequestError(
                f"{num_layers} layers can't be divided over {self.pipeline} stages"
                + (f" with {rest} left for {open_stages} of them" if open_stages != self.pipeline else ""),
                where="pipeline parallel size",
                needed=f"one of {', '.join(map(str, legal))}, or other numbers of layers in the first and last stage",
                action="set --target-first-stage-layers and --target-last-stage-layers",
            )
        stages, first = [], 0
        for count in counts:
            size = rest // open_stages if count is None else count
            stages.append(range(first, first + size))
            first += size
        return stages
