"""Parity at start: before the first step from trained weights, their loss in Megatron against that in Hugging Face.

The Megatron model is the one that will be trained, on all its ranks, with the loss that will be trained on; the Hugging
Face model runs beside it on the first rank's CPU (`hf_reference`). Both see one sequence, and the losses of all its
tokens are compared: a mean alone would hide what goes wrong at some positions only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.host_memory import available_bytes
from pretrainkit.errors import CheckpointError
from pretrainkit.logs import get_logger
from pretrainkit.release import hf_reference, prompts
from pretrainkit.run.resume_plan import WEIGHTS, StartPlan
from pretrainkit.units import format_bytes

AUTO, OFF, REQUIRE = "auto", "off", "require"
"""Values of --start_parity: compare where it can be done, never, or don't start without."""
MAX_TOKENS = 1024
"""Longest sequence compared: a CPU runs 8B parameters over it in well under a minute."""
LONGEST_WAIT = timedelta(hours=3)
"""For the Hugging Face model, whose weights may lie on a slow disk."""
_STORE_KEY = "pretrainkit/start_parity"

log = get_logger(__name__)


@dataclass(frozen=True)
class Bound:
    """How far the losses of tokens may be apart, nats."""

    root_mean_square: float
    largest: float


BOUNDS = {"fp32": Bound(1e-4, 1e-3), "bf16": Bound(0.15, 2.0)}
"""By the precision that Megatron computes in; Hugging Face computes in fp32, from the same rounded weights.

Measured with SmolLM2-135M on CPU: Megatron differs by 7e-7 and at most 2e-6 in fp32, by 0.057 and at most 0.43 in bf16
(transformers in bf16 by 0.070 and 0.50); two query heads of one layer exchanged by 0.24, a doubled rotary base by 0.25.
"""


@dataclass(frozen=True)
class Losses:
    """What the first rank tells all others."""

    tokens: list[int]
    """Input ids, and one more."""
    losses: list[float]
    """Hugging Face's, of the next token at every input, nats."""
    skipped: str = ""
    """Why there are none, where that is no reason to stop."""
    failed: str = ""
    """Why there are none, where it is."""


@dataclass(frozen=True)
class Verdict:
    """The outcome, the same on all ranks."""

    passed: bool
    num_tokens: int
    hf_loss: float
    """Mean over the tokens, nats."""
    megatron_loss: float
    root_mean_square: float
    """Of the differences, on the rank where it is largest."""
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
    """What one rank has seen of its part of the sequence."""

    num_tokens: float = 0
    """0 on ranks that have no losses."""
    loss_sum: float = 0
    square_sum: float = 0
    """Of the differences."""
    largest: float = 0


def judge(deviations: Sequence[Deviation], reference: Losses, bound: Bound) -> Verdict:
    """The verdict on all ranks' deviations; every data parallel rank has seen the whole sequence."""
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
    """The largest, which a NaN is."""
    listed = list(values)
    return math.nan if any(math.isnan(value) for value in listed) else max(listed, default=math.nan)


def sequence_length(run: ResolvedRun) -> int:
    """Tokens that are compared: the run's sequence or MAX_TOKENS, as a multiple of what TP and CP cut."""
    parallel, length = run.config.parallel, run.config.data.sequence_length
    unit = 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size
    return length if length <= MAX_TOKENS else max(MAX_TOKENS // unit, 1) * unit


class Parity:
    """The comparison of one start, on one rank: begun when the rank starts, ended before the first step."""

    def __init__(self, run: ResolvedRun, *, rank: int) -> None:
        self._run, self._rank = run, rank
        self._mode = run.config.training.start_parity
        self._tokens: list[int] = []
        self._process: hf_reference.Process | None = None
        self._skipped = ""
        if self._mode == OFF:
            self._skipped = "--start_parity off"
        elif not (reference := _hf_weights(run)):
            self._skipped = "the Hugging Face weights that the checkpoint was made from are not at hand"
        elif rank == 0:
            self._begin(Path(reference))

    def _begin(self, folder: Path) -> None:
        """Let the Hugging Face model run, beside the loading of the Megatron model."""
        run = self._run
        if not folder.is_dir():
            self._skipped = f"there is no {folder} on this machine"
            return
        num_tokens = sequence_length(run)
        needed, available = hf_reference.needed_bytes(run.model, num_tokens), available_bytes()
        if needed > available:
            self._skipped = f"it needs {format_bytes(needed)} of memory, {format_bytes(available)} are available"
            return
        self._tokens = _text_tokens(Path(run.hf_folder), num_tokens + 1)
        padding = run.padded_vocab_size - run.model.vocab_size
        log.info("start parity: running %s in transformers, to compare %d tokens", folder, num_tokens)
        self._process = hf_reference.Process(hf_reference.Request(str(folder), self._tokens, run.precision, padding))

    def compare(self, measure: Callable[[Losses], list[Deviation]]) -> dict[str, Any]:
        """Compare on all ranks together; gives the record of it.

        `measure` runs the Megatron model and gives all ranks' deviations. Raises CheckpointError on every rank when
        the losses are not the same, or when they must be compared and can't be.
        """
        reference = self._share()
        if reference.failed:
            raise CheckpointError(
                reference.failed,
                action="mend it, or start without the comparison: --start_parity off",
                where="start parity",
            )
        if reference.skipped:
            level = INFO if self._mode == OFF else WARNING
            self._tell("start parity: not compared: %s", reference.skipped, level=level)
            return {"result": "skipped", "reason": reference.skipped}
        verdict = judge(measure(reference), reference, BOUNDS[self._run.precision])
        if not verdict.passed:
            raise RefusedWeights(verdict, self._run)
        self._tell("start parity passed: %s", verdict)
        return {"result": "passed", **verdict.to_json()}

    def _tell(self, text: str, what: object, *, level: int = INFO) -> None:
        if self._rank == 0:
            log.log(level, text, what)

    def _share(self) -> Losses:
        """The first rank's losses, on every rank.

        Through torch's key-value store: a collective's timeout, which is of minutes, doesn't count while one waits.
        """
        if self._mode == OFF or not _hf_weights(self._run):
            return self._without(self._skipped)
        import torch.distributed.distributed_c10d as c10d

        store = c10d._get_default_store()
        if self._rank == 0:
            store.set(_STORE_KEY, json.dumps(asdict(self._losses())))
        store.wait([_STORE_KEY], LONGEST_WAIT)
        return Losses(**json.loads(store.get(_STORE_KEY)))

    def _losses(self) -> Losses:
        if self._process is None:
            return self._without(self._skipped)
        try:
            losses = self._process.losses()
        except MemoryError as error:
            return self._without(str(error))
        except CheckpointError as error:
            return Losses([], [], failed=str(error))
        log.info("start parity: the Hugging Face model took %.0f s", self._process.elapsed_s)
        return Losses(self._tokens, losses)

    def _without(self, reason: str) -> Losses:
        if self._mode == REQUIRE:
            return Losses([], [], failed=f"--start_parity require, but {reason}")
        return Losses([], [], skipped=reason)


class RefusedWeights(CheckpointError):
    """The model that was loaded is not the one in the Hugging Face folder."""

    def __init__(self, verdict: Verdict, run: ResolvedRun) -> None:
        self.verdict = verdict
        super().__init__(
            f"the loaded model is not that of {_hf_weights(run)}: {verdict}",
            needed="the same loss from both, before the first step",
            action="convert the model again; if --hf_model_id and --nemo_model are of two models, name the right one",
            where=run.initial_weights.checkpoint if run.initial_weights else "",
        )


def _hf_weights(run: ResolvedRun) -> str | None:
    return run.initial_weights.hf_weights if run.initial_weights else None


def begin(run: ResolvedRun, plan: StartPlan, *, rank: int) -> Parity | None:
    """The comparison of this start; None when it doesn't begin with another model's weights."""
    return Parity(run, rank=rank) if plan.mode == WEIGHTS else None


def _text_tokens(tokenizer_folder: Path, count: int) -> list[int]:
    """The first ids of text in several languages, then English."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    text = "\n\n".join([*prompts.SHORT.values(), prompts.long_text()])
    # No tokenizer here packs more than 16 characters into a token on average.
    ids = tokenizer(text[: 16 * count], add_special_tokens=True)["input_ids"]
    return [ids[index % len(ids)] for index in range(count)]


def measure(
    chunks: Sequence[Any],
    forward_step: Callable[[Any, dict[str, Any]], Any],
    reference: Losses,
    device: Any,
) -> list[Deviation]:
    """Run the Megatron model of all ranks over the reference's tokens; all ranks' deviations, on every rank.

    `chunks` are this rank's pipeline stages as the engine trains them. Changes neither weights nor gradients nor random
    states.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.utils import get_batch_on_this_cp_rank

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
def _unchanged_random_state(device: Any) -> Any:
    import torch
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        yield
    tracker.set_states(states)


@contextmanager
def _without_gather_hooks(chunks: Sequence[Any]) -> Any:
    """Without the hooks that gather parameters while the model runs, which count on an optimizer step before it."""
    modules = [chunk.module for chunk in chunks if getattr(chunk.module, "remove_forward_pre_hook_handles", None)]
    for module in modules:
        module.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        for module in modules:
            module.enable_forward_pre_hook()
