"""Notes steps and phases for the watch over the ranks, and gives collectives a time limit that leaves it the word."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from megatron.core import parallel_state

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.agreement import limit_collectives
from pretrainkit.engine.progress import Progress
from pretrainkit.run import progress as records
from pretrainkit.units import parse_duration


class ReportProgress(pl.Callback):
    """The first callback, so that a step has ended before what follows it: a save, an evaluation."""

    def __init__(self, run: ResolvedRun, progress: Progress) -> None:
        self._progress = progress
        self._hang_timeout_s = parse_duration(run.config.training.hang_timeout)
        self._has_begun = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._progress.stage = parallel_state.get_pipeline_model_parallel_rank()
        limit_collectives(timedelta(seconds=records.hang_limit_s(records.BUILDING, self._hang_timeout_s)))
        self._progress.phase(records.BUILDING)
        load = trainer.strategy.load_checkpoint

        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            self._progress.phase(records.LOADING)
            return load(*args, **kwargs)

        trainer.strategy.load_checkpoint = load_checkpoint

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        limit_collectives(timedelta(seconds=self._hang_timeout_s))
        self._progress.phase(records.CHECKING)

    def on_train_batch_start(self, *_: Any) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._progress.phase(records.FIRST_STEP)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._progress.step_done(trainer.global_step)

    def on_validation_start(self, *_: Any) -> None:
        self._progress.phase(records.EVALUATING)

    def on_validation_batch_end(self, *_: Any) -> None:
        self._progress.tick()

    def on_validation_end(self, *_: Any) -> None:
        self._progress.phase(records.TRAINING)

    def on_train_end(self, *_: Any) -> None:
        self._progress.phase(records.FINISHING)
