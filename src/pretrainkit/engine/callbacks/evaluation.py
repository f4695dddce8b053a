"""When NeMo's trainer evaluates on validation data."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.logs import get_logger

log = get_logger(__name__)


class Evaluations(pl.Callback):
    """Evaluates every `val_interval` steps and after the last one, in however many attempts the run takes.

    Lightning counts batches since the data loader's start instead, which differs after a resume.
    """

    def __init__(self, run: ResolvedRun) -> None:
        self._interval, self._max_steps = run.config.training.val_interval, run.max_steps

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop

        def is_due(_: Any) -> bool:
            # Lightning also asks once before it trains, at a step that the earlier attempt may have evaluated.
            is_before_training = getattr(loop, "skip_val_on_restart", False)
            step = trainer.global_step
            if is_before_training or (step % self._interval and step < self._max_steps):
                return False
            _log_if_stopped(trainer)
            return not trainer.should_stop

        if self._interval:
            loop._should_check_val_fx = is_due

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _log_if_stopped(trainer)


def _log_if_stopped(trainer: pl.Trainer) -> None:
    if trainer.should_stop:
        log.warning("asked to stop: the held-out loss after step %d is not measured", trainer.global_step)
