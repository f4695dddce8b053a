"""When checkpoints are saved during NeMo's training, what a failed save means, and which ones are removed."""

from __future__ import annotations

import shutil
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.callbacks.recording import wait_for_device
from pretrainkit.engine.nemo import AsyncFinalizerCallback
from pretrainkit.engine.progress import Progress
from pretrainkit.engine.saving import SaveFailure, Saver
from pretrainkit.errors import CheckpointError, PretrainkitError
from pretrainkit.logs import get_logger
from pretrainkit.run import checkpoints, evaluations
from pretrainkit.run import progress as records
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.run.retention import apply_retention
from pretrainkit.units import format_bytes, format_duration

FIRST_WAIT_S, WAIT_GROWTH = 1.0, 4.0
"""Wait before the second attempt of a save, and its growth for each further one."""
NOT_SAVED = -1

log = get_logger(__name__)


class Checkpoints(AsyncFinalizerCallback, Checkpoint):
    """Saves at every save interval, when the run is asked to stop, and after the last step.

    It replaces NeMo's ModelCheckpoint and the callback that would finalise its saves. A save that fails is tried again;
    one in the background is replaced by a save of the current step, as its own state is gone. After the last attempt
    the run ends, or continues without the checkpoint while no more than `max_missed_saves` in a row were missed. The
    last save of an attempt must not be missed.
    """

    def __init__(self, run: ResolvedRun, recorder: RunRecorder | None, progress: Progress, *, saved_step: int) -> None:
        """`saved_step`: the step that the run continues from, which needs no saving."""
        self._run, self._recorder, self._progress = run, recorder, progress
        self._saver = Saver(run)
        self._step = saved_step
        """Step of the newest checkpoint that is complete or being written; NOT_SAVED after a failure."""
        self._lost_step = NOT_SAVED
        """Step of the last save that failed."""
        self._failures = 0
        """Failed attempts of the current save."""
        self._missed_in_a_row = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        is_last = trainer.should_stop or trainer.global_step >= self._run.max_steps
        is_due = is_last or trainer.global_step % self._run.config.training.save_interval == 0
        if is_due:
            wait_for_device(self._run.accelerator)
        began_s = time.monotonic()
        if self._saver.current and (failure := self._finish(trainer, wait=False)):
            is_due |= self._tries_again(failure, self._lost_step)
        if is_due:
            self._progress.phase(records.SAVING)
            self._save(trainer, is_last=is_last)
            self._progress.phase(records.TRAINING)
        else:
            self._saver.memory.begin(trainer)
        if self._recorder:
            self._recorder.skip_time(time.monotonic() - began_s)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Nothing: there is one epoch as Lightning counts them."""

    def on_train_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._save(trainer, is_last=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # An error of this project is raised on all ranks: they can still finish a save together.
        if self._saver.current and isinstance(exception, PretrainkitError):
            self._finish_and_log(trainer)

    def _save(self, trainer: pl.Trainer, *, is_last: bool) -> None:
        """Save this step, in as many attempts as are allowed; wait for it with `is_last` or without async saving."""
        step = trainer.global_step
        if self._saver.current and is_last:
            self._finish_and_log(trainer)
        elif self._saver.current and step != self._step:
            log.warning(
                f"step {step} is to be saved while step {self._step} is still being written: training waits for it; a "
                "larger --save_interval avoids this"
            )
            if failure := self._finish(trainer, wait=True):
                self._tries_again(failure, self._lost_step)
        while step != self._step:
            if trainer.is_global_zero and (last := self._last()) and (free := self._free_bytes()) < last.num_bytes:
                log.warning("%s are free for a checkpoint of %s", format_bytes(free), format_bytes(last.num_bytes))
            failure = self._saver.begin(trainer)
            if failure is None:
                self._step = step
                if is_last or not self._run.async_save:
                    failure = self._finish(trainer, wait=True)
            if failure and not self._tries_again(failure, step, is_last=is_last):
                return

    def _finish(self, trainer: pl.Trainer, *, wait: bool) -> SaveFailure | None:
        """End the save that is being written, if that is done or with `wait`; its failure, if it failed."""
        save = self._saver.current
        assert save
        is_over, failure = self._saver.end(trainer, wait=wait)
        if failure:
            self._step, self._lost_step = NOT_SAVED, save.step
        elif is_over:
            self._failures = self._missed_in_a_row = 0
            if trainer.is_global_zero:
                took_s = time.monotonic() - self._saver.began_s
                waited_s = took_s if wait else self._saver.copying_s
                words = "saved step %d in %s, of which training waited %s"
                log.info(words, save.step, format_duration(took_s), format_duration(waited_s))
                if self._recorder:
                    seconds = {"seconds": round(took_s, 3), "waited_s": round(waited_s, 3)}
                    self._recorder.event("checkpoint", step=save.step, path=str(save.path), **seconds)
                if evaluations.is_due(self._run, save.step):
                    evaluations.mark_due(self._run, save.step)
                apply_retention(self._run)
        return failure

    def _finish_and_log(self, trainer: pl.Trainer) -> None:
        """Finish the save that is being written; the caller ends the run, so a failure is only logged."""
        if failure := self._finish(trainer, wait=True):
            log.warning("a save failed (%s): step %d is lost", failure.message, self._lost_step)
            self._failures = 0

    def _tries_again(self, failure: SaveFailure, step: int, *, is_last: bool = False) -> bool:
        """Wait for another attempt, or give this save up: continue without it or raise CheckpointError on all ranks."""
        self._failures += 1
        retries = self._run.config.training.save_retries
        if failure.is_permanent or self._failures > retries:
            self._failures = 0
            self._miss(failure, step, is_last=is_last)
            return False
        wait_s = FIRST_WAIT_S * WAIT_GROWTH ** (self._failures - 1)
        attempt = f"attempt {self._failures + 1} of {retries + 1} in {format_duration(wait_s)}"
        log.warning("a save failed (%s); %s", failure.message, attempt)
        time.sleep(wait_s)
        return True

    def _miss(self, failure: SaveFailure, step: int, *, is_last: bool) -> None:
        self._missed_in_a_row += 1
        last, limit = self._last(), self._run.config.training.max_missed_saves
        advice = failure.advice(free_bytes=self._free_bytes(), checkpoint_bytes=last.num_bytes if last else None)
        if self._recorder:
            self._recorder.event("missed_save", step=step, problem=failure.message)
        if is_last or self._missed_in_a_row > limit:
            raise CheckpointError(
                f"step {step} could not be saved: {failure.message}. "
                f"Last good checkpoint: {last.path if last else 'none'}",
                action=advice,
                where=str(RunFolder.of(self._run).checkpoints),
            )
        log.error(
            f"STEP {step} IS NOT SAVED, the run continues ({self._missed_in_a_row} missed in a row, {limit} allowed): "
            f"{failure.message}. {advice}"
        )

    def _last(self) -> checkpoints.Checkpoint | None:
        """The newest complete checkpoint."""
        return next(reversed(checkpoints.all_complete(RunFolder.of(self._run).checkpoints)), None)

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._run.experiment_dir).free
