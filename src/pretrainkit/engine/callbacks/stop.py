"""Ending NeMo's training early, on all ranks at the same step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from pretrainkit.engine.agreement import all_ranks_any
from pretrainkit.signals import RankStopRequests


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
