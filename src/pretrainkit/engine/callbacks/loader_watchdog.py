"""An end to waits for training data: a rank whose DataLoader workers hang stops, so that it can be restarted."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.agreement import COLLECTIVE_MARGIN
from pretrainkit.engine.child_processes import kill_children
from pretrainkit.engine.progress import Progress
from pretrainkit.logs import get_logger
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.units import format_duration, parse_duration

_POLL_S = 1.0

log = get_logger(__name__)


def wait_limit_s(run: ResolvedRun) -> float:
    """Longest wait for data. The watch over the ranks comes before it, in runs that this project has started."""
    return parse_duration(run.config.training.hang_timeout) + COLLECTIVE_MARGIN.total_seconds()


class DataLoaderWatchdog(pl.Callback):
    """Kills the DataLoader's workers when the rank has waited for a batch too long, and at the end of training.

    A DataLoader's own timeout covers the wait for a sample's announcement only. The rank then asks the worker for the
    shared memory that holds the sample, without a timeout. A killed worker ends each of these waits with an error.
    """

    def __init__(self, run: ResolvedRun, recorder: RunRecorder | None, progress: Progress) -> None:
        self._num_workers, self._limit_s = run.config.data.num_workers, wait_limit_s(run)
        self._recorder, self._progress = recorder, progress
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

    def data_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's data step, with its wait for the loader watched and recorded, and the positions without a loss.

        Both are recorded while the complete batch is on the CPU: later each pipeline stage has only what it needs.
        """
        take, recorder = self.watched(next), self._recorder

        def watched_step(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
            start_s = time.monotonic()
            with self._progress.waiting_for_data():
                batch = take(batches)
            if recorder and torch.is_grad_enabled():  # not in an evaluation
                recorder.data_wait(time.monotonic() - start_s)
                recorder.padding((batch[0] if isinstance(batch, tuple) else batch)["loss_mask"])
            return step(iter([batch]), *args, **kwargs)

        return watched_step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        evaluations = trainer.fit_loop.epoch_loop.val_loop
        evaluations.reset = self.watched(evaluations.reset)  # it waits for persistent workers to reset
        if self._num_workers:
            threading.Thread(target=self._watch, name="data loader watchdog", daemon=True).start()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        kill_children(loader_workers_only=True)  # Lightning joins them before `train` could kill them

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        kill_children(loader_workers_only=True)

    def _watch(self) -> None:
        while time.monotonic() - self._waits_since_s < self._limit_s:
            time.sleep(_POLL_S)
        log.error(
            "no data for %s: killing the DataLoader's workers, which ends the run", format_duration(self._limit_s)
        )
        kill_children(loader_workers_only=True)
