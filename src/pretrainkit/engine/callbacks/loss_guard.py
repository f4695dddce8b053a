"""Keeping NeMo's training from learning from a bad batch."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.agreement import Agreement
from pretrainkit.engine.loss_judge import LossJudge
from pretrainkit.errors import PretrainkitError
from pretrainkit.megatron.dataset import documents_of_samples
from pretrainkit.run.metrics import RunRecorder

MAX_SKIPPED_IN_A_ROW = 10
"""Bad steps that are skipped one after another before the run stops: by then it is the weights, not the data."""


class LossGuard(pl.Callback):
    """Keeps a step whose loss or gradient norm is bad from changing the weights, on all ranks alike.

    Judged between the backward pass and the update, where the norm has to be waited for anyway: the last pipeline stage
    knows the loss, averaged over all data parallel ranks, every rank knows the norm, and one of them is enough to skip
    the update on all.
    """

    loss = 0.0
    """Of the last step, in nats per token; not known on the pipeline stages between the first and the last."""
    grad_norm = 0.0
    """Of the last step, before clipping."""

    def __init__(self, run: ResolvedRun, recorder: RunRecorder | None) -> None:
        self._run, self._recorder = run, recorder
        self._judge = LossJudge(run.config.training.max_loss_spike)
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
        self._agreement = Agreement()
        for optimizer in strategy.optimizers:
            self._guard(optimizer.mcore_optimizer, trainer)

    def _guard(self, optimizer: Any, trainer: pl.Trainer) -> None:
        get_grad_norm, step = optimizer.get_grad_norm, optimizer.step_with_ready_grads

        def judged_grad_norm() -> Any:
            norm = get_grad_norm()
            self.loss, self.grad_norm = float(self._output), float(norm)
            self._is_good = self._judged(trainer)
            return norm

        def guarded_step() -> bool:
            if self._is_good:
                return step()
            # Moments are made in the first update; a checkpoint needs them even if there was none yet.
            for part in optimizer.chained_optimizers:
                part.init_state_fn(part.optimizer, part.config)
            return False

        optimizer.get_grad_norm, optimizer.step_with_ready_grads = judged_grad_norm, guarded_step

    def _judged(self, trainer: pl.Trainer) -> bool:
        loss = self.loss
        bad_loss = self._judge.problem(loss) if parallel_state.is_pipeline_last_stage() else ""
        bad_norm = "" if math.isfinite(self.grad_norm) else f"the gradient norm is {self.grad_norm}"
        if not any(self._agreement.any(bool(bad_loss or bad_norm))):
            self._judge.accept(loss)
            self._skipped_in_a_row = 0
            return True
        # The first rank is of the first stage, which was sent the loss; only the last one judges it.
        what = bad_loss or self._judge.problem(loss) or bad_norm or "a bad loss on another rank"
        self._skipped_in_a_row += 1
        give_up = self._skipped_in_a_row > MAX_SKIPPED_IN_A_ROW
        stop = give_up or self._run.config.training.on_bad_loss == "stop"
        self._report(trainer, what, loss, stop=stop)
        if stop:
            raise PretrainkitError(
                f"step {trainer.global_step + 1}: {what}" + (", as in the steps before" if give_up else ""),
                needed="a finite loss" + (", no spike" if self._run.config.training.max_loss_spike else ""),
                action="look at the documents of this batch, named in metrics.jsonl (event bad_loss); "
                "--on_bad_loss skip leaves such steps out",
                where=self._run.experiment_dir,
            )
        return False

    def _report(self, trainer: pl.Trainer, what: str, loss: float, *, stop: bool) -> None:
        if not self._recorder:
            return
        first = trainer.datamodule.state_dict()["consumed_samples"]
        samples = range(first, first + self._run.config.training.global_batch_size)
        documents = documents_of_samples(trainer.datamodule._train_ds, samples)
        self._recorder.bad_loss(
            trainer.global_step + 1,
            problem=what,
            loss=loss,
            grad_norm=self.grad_norm,
            samples=samples,
            documents=documents,
            skipped=not stop,
        )
