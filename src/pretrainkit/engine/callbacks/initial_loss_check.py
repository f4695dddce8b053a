"""The initial loss check of a start from another model's weights, before the first step (--start_parity).

The loaded Megatron model's loss is compared with that of its Hugging Face original. The Megatron model is the one that
will be trained, on all its ranks, with the loss that it will be trained on; the Hugging Face model runs on the first
rank's CPU (`hf_reference`). Both get one sequence, and the losses of all its tokens are compared: a mean alone would
hide an error that affects some positions only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import get_batch_on_this_cp_rank

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import CheckpointError
from pretrainkit.hf_tokenizer import readable_folder
from pretrainkit.logs import get_logger
from pretrainkit.machine import available_memory_bytes
from pretrainkit.megatron.fp8.module import in_bf16
from pretrainkit.models.rope_change import trained_folder
from pretrainkit.release import hf_reference, prompts
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.units import format_bytes

OFF, REQUIRE = "off", "require"
"""Values of --start_parity, other than auto, which checks where it can."""
MAX_TOKENS = 1024
"""Longest sequence compared: a CPU runs 8B parameters over it in well under a minute."""

MAX_WAIT = timedelta(hours=3)
"""Longest wait for the Hugging Face model, whose weights may be on a slow disk."""
_STORE_KEY = "pretrainkit/initial_loss"

BOUNDS = {"fp32": {"root_mean_square": 1e-4, "largest": 1e-3}, "bf16": {"root_mean_square": 0.15, "largest": 2.0}}
"""How far the losses of tokens may differ, in nats, by the precision that Megatron computes in; Hugging Face computes
in fp32, from the same rounded weights.

Measured with SmolLM2-135M on CPU: Megatron differs by 7e-7 and at most 2e-6 in fp32, by 0.057 and at most 0.43 in bf16
(transformers in bf16 by 0.070 and 0.50); two query heads of one layer swapped by 0.24, a doubled rotary base by 0.25.
"""

log = get_logger(__name__)


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
    bound: dict[str, float]

    def __str__(self) -> str:
        return (
            f"loss {self.megatron_loss:.5f} in Megatron and {self.hf_loss:.5f} in Hugging Face, of {self.num_tokens} "
            f"tokens; differences {self.root_mean_square:.1e} (root mean square, bound "
            f"{self.bound['root_mean_square']:.0e}) and {self.largest:.1e} (largest, bound {self.bound['largest']:.0e})"
        )


class InitialLossCheck(pl.Callback):
    """Compares the loaded model's loss with that of its Hugging Face original, which starts with the constructor."""

    def __init__(self, run: ResolvedRun, recorder: RunRecorder | None, *, rank: int) -> None:
        self._run, self._recorder, self._rank = run, recorder, rank
        self._mode = run.config.training.start_parity
        self._tokens: list[int] = []
        self._process: hf_reference.Process | None = None
        self._reason = self._start_reference() if rank == 0 else ""
        """Why the Hugging Face model does not run."""

    def _start_reference(self) -> str:
        """Start the Hugging Face model, while the Megatron model is being loaded; gives the reason if it can't."""
        run = self._run
        if self._mode == OFF:
            return "--start_parity off"
        if not (folder := _hf_weights(run)):
            return "the Hugging Face weights that the checkpoint was converted from were not found"
        if not Path(folder).is_dir():
            return f"there is no {folder} on this machine"
        num_tokens = sequence_length(run)
        needed, available = hf_reference.needed_bytes(run.model, num_tokens), available_memory_bytes()
        if needed > available:
            return f"it needs {format_bytes(needed)} of memory, {format_bytes(available)} are available"
        self._tokens = _text_tokens(Path(run.hf_folder), num_tokens + 1)
        padding = run.padded_vocab_size - run.model.vocab_size
        log.info("initial loss check: running %s in transformers, to compare %d tokens", folder, num_tokens)
        with_change = str(trained_folder(Path(folder), run.config))
        self._process = hf_reference.Process(hf_reference.Request(with_change, self._tokens, run.precision, padding))
        return ""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise CheckpointError on every rank when the losses differ, or when they must be compared and can't be."""
        reference = self.share_reference()
        if reference.failed:
            raise CheckpointError(
                reference.failed,
                action="fix the cause, or start without the comparison: --start_parity off",
                where="initial loss check",
            )
        if reference.skipped:
            self._record(result="skipped", reason=reference.skipped)
            if self._rank == 0:
                level = INFO if self._mode == OFF else WARNING
                log.log(level, "initial loss check: not compared: %s", reference.skipped)
            return
        strategy: Any = trainer.strategy
        forward_step: Any = pl_module.config.forward_step_fn
        deviations = measure(list(strategy.megatron_parallel), forward_step, reference, strategy.root_device)
        verdict = judge(deviations, reference, BOUNDS[self._run.precision])
        self._record(result="passed" if verdict.passed else "refused", **asdict(verdict))
        if not verdict.passed:
            raise CheckpointError(
                f"the loaded model is not that of {_hf_weights(self._run)}: {verdict}",
                needed="the same loss from both, before the first step",
                action="convert the model again, or name the same model as --hf_model_id and --nemo_model",
                where=self._run.initial_weights.checkpoint if self._run.initial_weights else "",
            )
        if self._rank == 0:
            log.info("initial loss check passed: %s", verdict)

    def share_reference(self) -> Reference:
        """The first rank's result, on every rank.

        Sent through torch's key-value store: a collective would time out after minutes.
        """
        store = c10d._get_default_store()
        if self._rank == 0:
            store.set(_STORE_KEY, json.dumps(asdict(self.reference())))
        store.wait([_STORE_KEY], MAX_WAIT)
        return Reference(**json.loads(store.get(_STORE_KEY)))

    def reference(self) -> Reference:
        """The Hugging Face model's losses, on the first rank; waits for them."""
        if self._process:
            try:
                return Reference(self._tokens, self._process.losses())
            except MemoryError as error:
                self._reason = str(error)
            except CheckpointError as error:
                return Reference(failed=str(error))
        if self._mode == REQUIRE:
            return Reference(failed=f"--start_parity require, but {self._reason}")
        return Reference(skipped=self._reason)

    def _record(self, **result: Any) -> None:
        if self._recorder:
            self._recorder.event("start_parity", **result)


def judge(deviations: Sequence[Sequence[float]], reference: Reference, bound: dict[str, float]) -> Verdict:
    """The verdict on what `measure` gives for all ranks; each data parallel rank has run the entire sequence."""
    seen = np.array([row for row in deviations if row[0]]).reshape(-1, 4)
    counts, losses, squares, differences = seen.T
    rms, largest = (float(np.max(values, initial=0.0)) for values in (np.sqrt(squares / counts), differences))  # or NaN
    count = float(counts.sum())
    return Verdict(
        passed=count >= len(reference.losses) and rms <= bound["root_mean_square"] and largest <= bound["largest"],
        num_tokens=len(reference.losses),
        hf_loss=sum(reference.losses) / len(reference.losses),
        megatron_loss=float(losses.sum()) / count if count else math.nan,
        root_mean_square=rms,
        largest=largest,
        bound=bound,
    )


def sequence_length(run: ResolvedRun) -> int:
    """Number of tokens to compare: the run's sequence length, or about MAX_TOKENS where TP and CP divide it."""
    parallel, length = run.config.parallel, run.config.data.sequence_length
    unit = 2 * parallel.context_parallel_size * parallel.tensor_model_parallel_size
    return length if length <= MAX_TOKENS else max(MAX_TOKENS // unit, 1) * unit


def measure(
    chunks: Sequence[Any], forward_step: Callable[..., torch.Tensor], reference: Reference, device: torch.device
) -> list[list[float]]:
    """Run the Megatron model of all ranks over the reference's tokens; gives a row for each rank, on every rank.

    A row has a rank's number of tokens (0 where it has no losses), the sum of their losses, and the sum of squares and
    the largest of the absolute differences from the reference.

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

    # FP8 rounds more than the faults that are looked for change; Fp8Check compares it with bf16.
    with torch.no_grad(), in_bf16(), unchanged_random_state(device), without_gather_hooks(chunks):
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
    return [row.tolist() for row in gathered]


@contextmanager
def unchanged_random_state(device: torch.device) -> Iterator[None]:
    """Leave torch's and Megatron's random states as they are."""
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    tracker.set_states(states)


@contextmanager
def without_gather_hooks(chunks: Sequence[Any]) -> Iterator[None]:
    """Disable the hooks that gather parameters during the forward pass: they expect an optimizer step before it."""
    modules = [chunk.module for chunk in chunks if getattr(chunk.module, "remove_forward_pre_hook_handles", None)]
    for module in modules:
        module.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        for module in modules:
            module.enable_forward_pre_hook()


def _hf_weights(run: ResolvedRun) -> str | None:
    return run.initial_weights.hf_weights if run.initial_weights else None


def _text_tokens(tokenizer_folder: Path, count: int) -> list[int]:
    """The first `count` ids of text in several languages, then English."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        readable_folder(tokenizer_folder), local_files_only=True, trust_remote_code=False
    )
    text = "\n\n".join([*prompts.SHORT.values(), prompts.long_text()])
    # No tokenizer here packs more than 16 characters into a token on average.
    ids = tokenizer(text[: 16 * count], add_special_tokens=True)["input_ids"]
    return [ids[index % len(ids)] for index in range(count)]
