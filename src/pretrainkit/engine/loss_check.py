"""The initial loss check: the loaded Megatron model's loss against that of its Hugging Face original.

The Megatron model is the one that will be trained, on all its ranks, with the loss that it will be trained on; the
Hugging Face model runs on the first rank's CPU (`hf_reference`). Both get one sequence, and the losses of all its
tokens are compared: a mean alone would hide an error that affects some positions only.
`callbacks.initial_loss_check` runs it before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import get_batch_on_this_cp_rank

from pretrainkit.config.schema import ResolvedRun

MAX_TOKENS = 1024
"""Longest sequence compared: a CPU runs 8B parameters over it in well under a minute."""


@dataclass(frozen=True)
class Bound:
    """How far the losses of tokens may differ, in nats."""

    root_mean_square: float
    largest: float


BOUNDS = {"fp32": Bound(1e-4, 1e-3), "bf16": Bound(0.15, 2.0)}
"""By the precision that Megatron computes in; Hugging Face computes in fp32, from the same rounded weights.

Measured with SmolLM2-135M on CPU: Megatron differs by 7e-7 and at most 2e-6 in fp32, by 0.057 and at most 0.43 in bf16
(transformers in bf16 by 0.070 and 0.50); two query heads of one layer swapped by 0.24, a doubled rotary base by 0.25.
"""


@dataclass(frozen=True)
class Reference:
    """The Hugging Face model's losses, which the first rank sends to all others."""

    tokens: list[int] = field(default_factory=list)
    """Input ids, and the one that follows the last."""
    losses: list[float] = field(default_factory=list)
    """Loss of the next token at each input, in nats."""
    skipped: str = ""
    """Why there are none, if training may start without."""
    failed: str = ""
    """Why there are none, if it may not."""


@dataclass(frozen=True)
class Verdict:
    """The outcome, the same on all ranks."""

    passed: bool
    num_tokens: int
    hf_loss: float
    """Mean over the tokens, nats."""
    megatron_loss: float
    root_mean_square: float
    """Of the token losses' differences, on the rank where it is largest."""
    largest: float
    bound: Bound

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"loss {self.megatron_loss:.5f} in Megatron and {self.hf_loss:.5f} in Hugging Face, of {self.num_tokens} "
            f"tokens; differences {self.root_mean_square:.1e} (root mean square, bound "
            f"{self.bound.root_mean_square:.0e}) and {self.largest:.1e} (largest, bound {self.bound.largest:.0e})"
        )


@dataclass(frozen=True)
class Deviation:
    """One rank's losses, and their differences from the reference, over its part of the sequence."""

    num_tokens: float = 0
    """0 on ranks that have no losses."""
    loss_sum: float = 0
    square_sum: float = 0
    """Sum of the squared differences."""
    largest: float = 0
    """Largest absolute difference."""


def judge(deviations: Sequence[Deviation], reference: Reference, bound: Bound) -> Verdict:
    """The verdict on all ranks' deviations; each data parallel rank has run the entire sequence."""
    seen = [one for one in deviations if one.num_tokens]
    count = sum(one.num_tokens for one in seen)
    rms = _largest(math.sqrt(one.square_sum / one.num_tokens) for one in seen)
    largest = _largest(one.largest for one in seen)
    return Verdict(
        passed=count >= len(reference.losses) and rms <= bound.root_mean_square and largest <= bound.largest,
        num_tokens=len(reference.losses),
        hf_loss=sum(reference.losses) / len(reference.losses),
        megatron_loss=sum(one.loss_sum for one in seen) / count if count else math.nan,
        root_mean_square=rms,
        largest=largest,
        bound=bound,
    )


def _largest(values: Any) -> float:
    """The largest value; NaN if any is."""
    listed = list(values)
    return math.nan if any(math.isnan(value) for value in listed) else max(listed, default=math.nan)


def sequence_length(run: ResolvedRun) -> int:
    """Number of tokens to compare: the run's sequence length, or about MAX_TOKENS where TP and CP divide it."""
    parallel, length = run.config.parallel, run.config.data.sequence_length
    unit = 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size
    return length if length <= MAX_TOKENS else max(MAX_TOKENS // unit, 1) * unit


def measure(
    chunks: Sequence[Any], forward_step: Callable[..., torch.Tensor], reference: Reference, device: torch.device
) -> list[Deviation]:
    """Run the Megatron model of all ranks over the reference's tokens; gives all ranks' deviations, on every rank.

    `chunks` are this rank's pipeline stages as the engine trains them. Weights, gradients and random states are left
    unchanged.
    """
    ids = torch.tensor([reference.tokens], device=device)
    batch = {
        "tokens": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "position_ids": torch.arange(ids.size(1) - 1, device=device)[None],
        "expected": torch.tensor([reference.losses], dtype=torch.float64, device=device),
    }
    batch = get_batch_on_this_cp_rank(batch)

    def step(_: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        return forward_step(model, batch), lambda losses, non_loss_data: losses

    with torch.no_grad(), _unchanged_random_state(device), _without_gather_hooks(chunks):
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[None] * len(chunks) if len(chunks) > 1 else None,
            model=list(chunks),
            num_microbatches=1,
            seq_length=len(reference.losses),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    values = torch.zeros(4, dtype=torch.float64, device=device)
    if outputs and parallel_state.is_pipeline_last_stage():
        losses = outputs[-1].double().reshape(1, -1)
        difference = losses - batch["expected"]
        sums = [losses.sum(), difference.square().sum(), difference.abs().max()]
        values = torch.stack([values.new_tensor(losses.numel()), *sums])
    gathered = [torch.zeros_like(values) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, values)
    return [Deviation(*one.tolist()) for one in gathered]


@contextmanager
def _unchanged_random_state(device: torch.device) -> Iterator[None]:
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    tracker.set_states(states)


@contextmanager
def _without_gather_hooks(chunks: Sequence[Any]) -> Iterator[None]:
    """Disable the hooks that gather parameters during the forward pass: they expect an optimizer step before it."""
    modules = [chunk.module for chunk in chunks if getattr(chunk.module, "remove_forward_pre_hook_handles", None)]
    for module in modules:
        module.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        for module in modules:
            module.enable_forward_pre_hook()
