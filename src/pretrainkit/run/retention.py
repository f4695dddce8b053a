"""Which checkpoints a run keeps, and with what."""

from __future__ import annotations

from pathlib import Path

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.logs import get_logger
from pretrainkit.run import checkpoints as resume
from pretrainkit.run import optimizer_state

log = get_logger(__name__)


def clear_away(run: ResolvedRun) -> None:
    """Remove, or make smaller, what need not be kept. Newer checkpoints are there, so no error here ends the run."""
    training, checkpoints = run.config.training, Path(run.experiment_dir) / resume.CHECKPOINTS
    try:
        for old in resume.expired(checkpoints, keep_last=training.keep_last, keep_every=training.keep_every):
            log.info("removing %s", old.path)
            resume.remove(old)
        for old in optimizer_state.expired(checkpoints, keep_last=training.keep_optimizer_last):
            log.info("leaving the optimizer state out of %s", old.path)
            optimizer_state.leave_out(old)
    except OSError as error:
        log.warning("old checkpoints could not be cleared away: %s", error)
