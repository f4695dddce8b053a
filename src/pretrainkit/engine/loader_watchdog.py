"""The processes that read a rank's data: ended when the rank has waited for them too long, and before it ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from pretrainkit.engine.forks import kill_children
from pretrainkit.logs import get_logger
from pretrainkit.units import format_duration

WAIT_LIMIT_S = 1800.0
"""A file system that was away comes back within minutes; a run that waits for data longer ends, to be started again."""
_POLL_S = 1.0

log = get_logger(__name__)


class Readers(pl.Callback):
    """Watches the rank's waits for data, and kills the processes that read when they hold it up.

    A DataLoader has a timeout, but it ends when a process has begun to hand over a sample: the rank asks it for the
    memory that this lies in, and waits for the answer for ever. Dead processes end every such wait, with an error.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._waits_since_s = math.inf

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which waits for data."""

        def wait(*arguments: Any) -> Any:
            self._waits_since_s = time.monotonic()
            try:
                return function(*arguments)
            finally:
                self._waits_since_s = math.inf

        return wait

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        evaluations = trainer.fit_loop.epoch_loop.val_loop
        evaluations.reset = self.watched(evaluations.reset)  # it asks processes that are there to begin again
        if self._num_workers:
            threading.Thread(target=self._watch, name="waits for data", daemon=True).start()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        kill_children(readers_only=True)  # Lightning waits for them before `train` could end them

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        kill_children(readers_only=True)

    def _watch(self) -> None:
        while time.monotonic() - self._waits_since_s < WAIT_LIMIT_S:
            time.sleep(_POLL_S)
        log.error(
            "no data for %s: the processes that read it are killed, which ends the run", format_duration(WAIT_LIMIT_S)
        )
        kill_children(readers_only=True)
