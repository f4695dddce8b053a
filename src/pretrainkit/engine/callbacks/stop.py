"""Ending NeMo's training early, on all ranks at the same step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from pretrainkit.engine.agreement import Agreement
from pretrainkit.engine.stop_requests import StopRequests


class StopEarly(pl.Callback):
    """Ends training after the step, or in the midst of the evaluation, in which any rank was asked to stop.

    Schedulers signal some ranks sooner than others, or only one, and clocks differ: after each step and each batch of
    an evaluation the ranks agree, so that all stop at the same one.
    """

    def __init__(self, requests: StopRequests) -> None:
        self._requests = requests

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._agreement = Agreement()
        self._requests.begin_steps()
        self._agree(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._agree(trainer)

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._agree(trainer):
            raise StopIteration  # Lightning's loop of an evaluation ends by it, as when there are no more batches

    def _agree(self, trainer: pl.Trainer) -> bool:
        (asked,) = self._agreement.any(self._requests.asked)
        if asked:
            trainer.should_stop = True
        return trainer.should_stop
