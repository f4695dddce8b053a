"""When NeMo's training ends early, on all ranks at the same step, and when it evaluates on validation data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.agreement import all_ranks_any
from pretrainkit.engine.callbacks.initial_loss_check import without_gather_hooks
from pretrainkit.logs import get_logger
from pretrainkit.run.resume_plan import StartPlan
from pretrainkit.signals import RankStopRequests

log = get_logger(__name__)


class StopEarly(pl.Callback):
    """Ends training after the step, or within the evaluation, in which any rank was asked to stop.

    Schedulers signal some ranks later than others, or only one, and clocks differ: the ranks agree after each step and
    each batch of an evaluation, so that all stop at the same one.
    """

    def __init__(self, requests: RankStopRequests) -> None:
        self._requests = requests

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._requests.begin_steps()
        self._agree(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._agree(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._agree(trainer):
            raise StopIteration  # ends Lightning's evaluation loop as running out of batches does

    def _agree(self, trainer: pl.Trainer) -> bool:
        if all_ranks_any(self._requests.asked):
            trainer.should_stop = True
        return trainer.should_stop


class Evaluations(pl.Callback):
    """Evaluates before the first step, every `val_interval` steps and after the last one, in however many attempts the
    run takes.

    Lightning counts batches since the data loader's start instead, which differs after a resume.
    """

    def __init__(self, run: ResolvedRun, plan: StartPlan) -> None:
        self._interval, self._max_steps, self._is_first = run.config.training.val_interval, run.max_steps, plan.is_first

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop

        def is_due(_: Any) -> bool:
            # Lightning also asks once before it trains, at a step that the earlier attempt may have evaluated.
            is_before_training = getattr(loop, "skip_val_on_restart", False)
            step = trainer.global_step
            if is_before_training or (step % self._interval and step < self._max_steps):
                return False
            self.on_validation_end(trainer)
            return not trainer.should_stop

        if self._interval:
            loop._should_check_val_fx = is_due
            if self._is_first and not trainer.should_stop:
                _evaluate(trainer)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.should_stop:
            log.warning("asked to stop: the held-out loss after step %d is not measured", trainer.global_step)


def _evaluate(trainer: pl.Trainer) -> None:
    """Run the evaluation loop before the first step, as Lightning's training loop does between steps."""
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False  # or it would leave out the batches that the checkpoint's last evaluation has done
    trainer.validating, first_loop_iter = True, connector._first_loop_iter
    with without_gather_hooks(list(trainer.strategy.megatron_parallel)):
        loop.run()
    trainer.training, connector._first_loop_iter = True, first_loop_iter
    loop._has_run = False  # a loop that goes on from a checkpoint would be done
