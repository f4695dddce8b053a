"""When checkpoints are saved during NeMo's training, what a failed save means, and which ones go."""

from __future__ import annotations

import shutil
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from nemo.utils.callbacks.dist_ckpt_io import AsyncFinalizerCallback

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.callbacks.training import wait_for_device
from pretrainkit.engine.save_failures import SaveFailure, wait_s
from pretrainkit.engine.saving import Save, Saver
from pretrainkit.errors import CheckpointError, PretrainkitError
from pretrainkit.logs import get_logger
from pretrainkit.run import checkpoints as resume
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.run.retention import apply_retention
from pretrainkit.units import format_bytes, format_duration

log = get_logger(__name__)


class Checkpoints(AsyncFinalizerCallback, Checkpoint):
    """Saves every so many steps, when the run is asked to stop, and after the last step.

    It takes the place of NeMo's ModelCheckpoint, and of the callback that would finalise its saves. A save that fails
    is tried again. One that fails for good ends the run, or, while there are fewer than `max_missed_saves` in a
    row, is missed; the last save of an attempt can't be.
    """

    def __init__(self, run: ResolvedRun, recorder: RunRecorder | None, *, saved_step: int) -> None:
        """`saved_step`: the step that the run continues from, which needs no saving."""
        self._run, self._recorder = run, recorder
        self._saver = Saver(run)
        self._step = saved_step
        """Of the newest checkpoint that is there or is being written."""
        self._attempt = 1
        """Of the save that is being written."""
        self._missed_in_a_row = 0
        self._good: resume.Checkpoint | None = None
        """The newest complete checkpoint that this attempt saved."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        is_last = trainer.should_stop or trainer.global_step >= self._run.max_steps
        saves = is_last or trainer.global_step % self._run.config.training.save_interval == 0
        if saves:
            wait_for_device(self._run.accelerator)
        began_s = time.monotonic()
        if self._saver.current:
            self._look(trainer, wait=False)
        if saves:
            self._save(trainer, is_last=is_last)
        if self._recorder:
            self._recorder.skip_time(time.monotonic() - began_s)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Nothing: there is one epoch as Lightning counts them."""

    def on_train_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._save(trainer, is_last=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # An error of ours is raised on all ranks: they can still end together what they began.
        if self._saver.current and isinstance(exception, PretrainkitError):
            self._look(trainer, wait=True, is_last=True)

    def _save(self, trainer: pl.Trainer, *, is_last: bool, attempt: int = 1) -> None:
        if self._saver.current and (is_last or trainer.global_step != self._step):
            if not is_last:
                log.warning(
                    "step %d is to be saved while step %d is still being written: training waits for it; a larger "
                    "--save_interval avoids this",
                    trainer.global_step,
                    self._step,
                )
            self._look(trainer, wait=True, is_last=is_last)
        if trainer.global_step == self._step:
            return
        while failure := self._write(trainer, wait=is_last or not self._run.async_save, attempt=attempt):
            if not self._may_retry(failure, attempt):
                self._miss(failure, trainer.global_step, is_last=is_last)
                return
            attempt += 1

    def _write(self, trainer: pl.Trainer, *, wait: bool, attempt: int) -> SaveFailure | None:
        """Begin a save, with `wait` also end it; None when that went well."""
        if self._good and (free := _free_bytes(self._run)) < self._good.num_bytes:
            log.warning("%s are free for a checkpoint of %s", format_bytes(free), format_bytes(self._good.num_bytes))
        self._attempt = attempt
        failure = self._saver.begin(trainer)
        if failure is None:
            self._step = trainer.global_step
            if wait:
                failure = self._end(trainer, wait=True)
        return failure

    def _look(self, trainer: pl.Trainer, *, wait: bool, is_last: bool = False) -> None:
        """End the save that is being written if it is done; should it have failed, save this step in its place.

        With `is_last` this step is the caller's business.
        """
        step = self._step
        failure = self._end(trainer, wait=wait)
        if failure is None:
            return
        if is_last:
            log.warning("a save failed (%s): step %d is lost", failure.message, step)
        elif self._may_retry(failure, self._attempt):
            self._save(trainer, is_last=False, attempt=self._attempt + 1)
        else:
            self._miss(failure, step, is_last=False)

    def _end(self, trainer: pl.Trainer, *, wait: bool) -> SaveFailure | None:
        save = self._saver.current
        assert save
        is_over, failure = self._saver.end(trainer, wait=wait)
        if not is_over:
            return None
        if failure:
            self._step = -1  # it is not there
            return failure
        self._missed_in_a_row = 0
        if trainer.is_global_zero:
            self._tell(save)
            apply_retention(self._run)
        return None

    def _tell(self, save: Save) -> None:
        self._good = resume.read(save.folder)
        log.info("saved step %d in %s", save.step, format_duration(time.monotonic() - save.began_s))
        if self._recorder:
            self._recorder.event("checkpoint", step=save.step, path=str(save.folder))

    def _may_retry(self, failure: SaveFailure, attempt: int) -> bool:
        """Whether there is another attempt, after a wait."""
        if failure.is_lasting or attempt > self._run.config.training.save_retries:
            return False
        log.warning(
            "a save failed (%s); attempt %d of %d in %s",
            failure.message,
            attempt + 1,
            self._run.config.training.save_retries + 1,
            format_duration(wait_s(attempt)),
        )
        time.sleep(wait_s(attempt))
        return True

    def _miss(self, failure: SaveFailure, step: int, *, is_last: bool) -> None:
        """Go on without this checkpoint, or raise CheckpointError on all ranks."""
        self._missed_in_a_row += 1
        checkpoints, limit = RunFolder.of(self._run).checkpoints, self._run.config.training
        complete = resume.all_complete(checkpoints)
        last = complete[-1] if complete else None
        advice = failure.advice(_free_bytes(self._run), last.num_bytes if last else None)
        if self._recorder:
            self._recorder.event("missed_save", step=step, problem=failure.message)
        if is_last or self._missed_in_a_row > limit.max_missed_saves:
            raise CheckpointError(
                f"step {step} could not be saved: {failure.message}. "
                f"Last good checkpoint: {last.path if last else 'none'}",
                action=advice,
                where=str(checkpoints),
            )
        log.error(
            "STEP %d IS NOT SAVED, the run goes on (%d missed in a row, %d allowed): %s. %s",
            step,
            self._missed_in_a_row,
            limit.max_missed_saves,
            failure.message,
            advice,
        )


def _free_bytes(run: ResolvedRun) -> int:
    return shutil.disk_usage(run.experiment_dir).free
