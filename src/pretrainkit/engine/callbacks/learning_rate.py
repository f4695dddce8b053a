"""The optimizer's settings at each step of NeMo's training."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.run.lr_schedule import schedule_of


class OptimizerSettings(pl.Callback):
    """Sets learning rate, weight decay, betas and eps before each step, from the step and this run's settings.

    They never come from a checkpoint, whose parameter groups hold the values of the run that wrote it.
    """

    def __init__(self, run: ResolvedRun) -> None:
        self._schedule, self._settings = schedule_of(run), run.config.optimizer

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        settings, learning_rate = self._settings, self._schedule.learning_rate(trainer.global_step)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"], group["eps"] = learning_rate, settings.adam_eps
                group["betas"] = (settings.adam_beta1, settings.adam_beta2)
                group["weight_decay"] = settings.weight_decay * group.get("pre_wd_mult", 1.0)
