"""The initial loss check of a start from another model's weights, before the first step (--start_parity)."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import timedelta
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed.distributed_c10d as c10d

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.loss_check import BOUNDS, Reference, Verdict, judge, measure, sequence_length
from pretrainkit.errors import CheckpointError
from pretrainkit.logs import get_logger
from pretrainkit.machine import available_memory_bytes
from pretrainkit.release import hf_reference, prompts
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.units import format_bytes

OFF, REQUIRE = "off", "require"
"""Values of --start_parity, other than auto, which checks where it can."""
MAX_WAIT = timedelta(hours=3)
"""Longest wait for the Hugging Face model, whose weights may be on a slow disk."""
_STORE_KEY = "pretrainkit/initial_loss"

log = get_logger(__name__)


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
        self._process = hf_reference.Process(hf_reference.Request(folder, self._tokens, run.precision, padding))
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
            level = INFO if self._mode == OFF else WARNING
            self._log(level, "initial loss check: not compared: %s", reference.skipped)
            self._record(result="skipped", reason=reference.skipped)
            return
        strategy: Any = trainer.strategy
        forward_step: Any = pl_module.config.forward_step_fn
        deviations = measure(list(strategy.megatron_parallel), forward_step, reference, strategy.root_device)
        verdict = judge(deviations, reference, BOUNDS[self._run.precision])
        self._record(result="passed" if verdict.passed else "refused", **verdict.to_json())
        if not verdict.passed:
            raise LossMismatchError(verdict, self._run)
        self._log(INFO, "initial loss check passed: %s", verdict)

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
                losses = self._process.losses()
            except MemoryError as error:
                self._reason = str(error)
            except CheckpointError as error:
                return Reference(failed=str(error))
            else:
                log.info("initial loss check: the Hugging Face model took %.0f s", self._process.elapsed_s)
                return Reference(self._tokens, losses)
        if self._mode == REQUIRE:
            return Reference(failed=f"--start_parity require, but {self._reason}")
        return Reference(skipped=self._reason)

    def _log(self, level: int, text: str, what: object) -> None:
        if self._rank == 0:
            log.log(level, text, what)

    def _record(self, **result: Any) -> None:
        if self._recorder:
            self._recorder.event("start_parity", **result)


class LossMismatchError(CheckpointError):
    """The loaded model is not the one in the Hugging Face folder."""

    def __init__(self, verdict: Verdict, run: ResolvedRun) -> None:
        super().__init__(
            f"the loaded model is not that of {_hf_weights(run)}: {verdict}",
            needed="the same loss from both, before the first step",
            action="convert the model again, or name the same model as --hf_model_id and --nemo_model",
            where=run.initial_weights.checkpoint if run.initial_weights else "",
        )


def _hf_weights(run: ResolvedRun) -> str | None:
    return run.initial_weights.hf_weights if run.initial_weights else None


def _text_tokens(tokenizer_folder: Path, count: int) -> list[int]:
    """The first `count` ids of text in several languages, then English."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    text = "\n\n".join([*prompts.SHORT.values(), prompts.long_text()])
    # No tokenizer here packs more than 16 characters into a token on average.
    ids = tokenizer(text[: 16 * count], add_special_tokens=True)["input_ids"]
    return [ids[index % len(ids)] for index in range(count)]
