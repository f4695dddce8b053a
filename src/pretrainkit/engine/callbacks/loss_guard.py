"""Keeping a bad loss or gradient from changing the weights: NaN, infinite, or far above the steps before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state

from pretrainkit.config.batch_size import batch_size_at
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.agreement import all_ranks_any
from pretrainkit.engine.callbacks.rollback import RollbackError
from pretrainkit.engine.loss_by_label import LossByLabel
from pretrainkit.engine.router_load import RouterLoad
from pretrainkit.errors import PretrainkitError
from pretrainkit.logs import get_logger
from pretrainkit.megatron.dataset import documents_of_samples
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.run.skipped_samples import NOTHING_SKIPPED, SkippedSamples, add_skipped

MAX_SKIPPED_IN_A_ROW = 10
"""Consecutive bad steps that are skipped before the run stops: by then the weights are the cause, not the data."""
WINDOW_STEPS = 32
"""Steps whose mean loss a new one is compared with."""
MIN_STEPS = 8
"""Steps in the window before a spike can be detected; every start begins with an empty window."""

_WORDS = {"stop": "stopping", "skip": "skipped", "rollback": "going back to the last checkpoint, without its samples"}

log = get_logger(__name__)


def problem_of(loss: float, before: Collection[float], max_spike: float | None) -> str:
    """What is wrong with a step's loss, after those of the steps `before`; empty if nothing is.

    `max_spike`: largest loss as a multiple of their mean; None allows any finite loss.
    """
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if max_spike is None or len(before) < MIN_STEPS or loss <= max_spike * (mean := sum(before) / len(before)):
        return ""
    return f"the loss {loss:.4f} is over {max_spike:g} x {mean:.4f}, the mean of {len(before)} steps"


class LossGuard(pl.Callback):
    """Skips the update of a step whose loss or gradient norm is bad, on all ranks alike.

    It judges between the backward pass and the update, where the norm has to be waited for anyway. The last pipeline
    stage knows the loss, averaged over all data parallel ranks; every rank knows the norm; one bad value is enough to
    skip the update on all.
    """

    loss = 0.0
    """Loss of the last step in nats per token; not known on the pipeline stages between the first and the last."""
    grad_norm = 0.0
    """Gradient norm of the last step, before clipping."""

    def __init__(
        self,
        run: ResolvedRun,
        recorder: RunRecorder | None,
        by_label: LossByLabel | None = None,
        router_load: RouterLoad | None = None,
        skipped: SkippedSamples = NOTHING_SKIPPED,
    ) -> None:
        self._run, self._recorder, self._skipped = run, recorder, skipped
        self._by_label, self._router_load = by_label, router_load
        self._losses = deque[float](maxlen=WINDOW_STEPS)
        """Of the last steps that changed the weights."""
        self._output: Any = None
        self._is_good = True
        self._skipped_in_a_row = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        training_step = strategy.training_step

        def noted_training_step(*args: Any, **kwargs: Any) -> Any:
            output = training_step(*args, **kwargs)
            self._output = output if torch.is_tensor(output) else output["loss"]
            return output

        strategy.training_step = noted_training_step
        if self._router_load:
            self._router_load.count(strategy.megatron_parallel)
        for optimizer in strategy.optimizers:
            self._guard(optimizer.mcore_optimizer, trainer)

    def _guard(self, optimizer: Any, trainer: pl.Trainer) -> None:
        get_grad_norm, step = optimizer.get_grad_norm, optimizer.step_with_ready_grads

        def judged_grad_norm() -> Any:
            norm = get_grad_norm()
            self.loss, self.grad_norm = float(self._output), float(norm)
            self._is_good = self._judged(trainer)
            if self._by_label:
                self._by_label.finish_step()
            if self._router_load:
                self._router_load.finish_step(trainer.strategy.root_device)
            return norm

        def guarded_step() -> bool:
            if self._is_good:
                return step()
            # The first update creates the moments; a checkpoint needs them even if every update so far was skipped.
            for part in optimizer.chained_optimizers:
                part.init_state_fn(part.optimizer, part.config)
            return False

        optimizer.get_grad_norm, optimizer.step_with_ready_grads = judged_grad_norm, guarded_step

    def _judged(self, trainer: pl.Trainer) -> bool:
        loss, max_spike = self.loss, self._run.config.training.max_loss_spike
        bad_loss = problem_of(loss, self._losses, max_spike) if parallel_state.is_pipeline_last_stage() else ""
        bad_norm = "" if math.isfinite(self.grad_norm) else f"the gradient norm is {self.grad_norm}"
        if not all_ranks_any(bool(bad_loss or bad_norm)):
            self._losses.append(loss)
            self._skipped_in_a_row = 0
            return True
        # The first rank is on the first stage, which receives the loss; only the last stage judges it.
        what = bad_loss or problem_of(loss, self._losses, max_spike) or bad_norm or "a bad loss on another rank"
        self._skipped_in_a_row += 1
        give_up = self._skipped_in_a_row > MAX_SKIPPED_IN_A_ROW
        action, most = self._run.config.training.on_bad_loss, self._run.config.training.max_rollbacks
        is_last_rollback = action == "rollback" and self._skipped.num_rollbacks >= most
        if give_up or is_last_rollback:
            action = "stop"
        self._report(trainer, what, loss, action)
        if action == "rollback":
            raise RollbackError(f"step {trainer.global_step + 1}: {what}")
        if action == "stop":
            after = f", after {most} rollbacks (--max_rollbacks)" if is_last_rollback else ""
            raise PretrainkitError(
                f"step {trainer.global_step + 1}: {what}" + (", as in the steps before" if give_up else after),
                needed="a finite loss" + (", no spike" if max_spike else ""),
                action="look at the documents of this batch, named in metrics.jsonl (event bad_loss); "
                "--on_bad_loss skip leaves such steps out, rollback their samples",
                where=self._run.experiment_dir,
            )
        return False

    def _report(self, trainer: pl.Trainer, what: str, loss: float, action: str) -> None:
        if not self._recorder:
            return
        first = trainer.datamodule.state_dict()["consumed_samples"]
        batch_size = batch_size_at(self._run.config.training, first)
        samples = self._skipped.places(range(first, first + batch_size))
        documents = documents_of_samples(trainer.datamodule._train_ds, samples)
        step = trainer.global_step + 1
        shown = "; ".join(f"{prefix}: {', '.join(map(str, ids[:20]))}" for prefix, ids in documents.items())
        log.warning(
            f"step {step}: {what}; {_WORDS[action]}. Samples {samples[0]} to {samples[-1]}, documents of {shown}"
        )
        self._recorder.event(
            "bad_loss",
            step=step,
            problem=what,
            batch_loss=loss,
            grad_norm=self.grad_norm,
            first_sample=samples[0],
            last_sample=samples[-1],
            documents=documents,
            skipped=action == "skip",
        )
        if action == "rollback":
            add_skipped(self._run, samples, step=step)
            details = {"first_sample": samples[0], "last_sample": samples[-1]}
            self._recorder.event(
                "rollback", step=trainer.global_step, number=self._skipped.num_rollbacks + 1, **details
            )
