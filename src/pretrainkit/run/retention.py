"""Which checkpoints a run keeps, and which of them with their optimizer state."""

from __future__ import annotations

import shutil
from pathlib import Path

from pretrainkit import files
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.logs import get_logger
from pretrainkit.run import optimizer_state
from pretrainkit.run.checkpoints import EXPIRED_SUFFIX, SMALLER_SUFFIX, Checkpoint, all_complete, optimizer_layout
from pretrainkit.run.folder import RunFolder

MIN_KEPT = 2
"""Complete checkpoints that are never removed: should the newest turn out bad, there is another."""

log = get_logger(__name__)


def apply_retention(run: ResolvedRun) -> None:
    """Remove expired checkpoints and expired optimizer states. Newer checkpoints exist, so errors are only logged."""
    training, checkpoints = run.config.training, RunFolder.of(run).checkpoints
    try:
        for old in expired(checkpoints, keep_last=training.keep_last, keep_every=training.keep_every):
            log.info("removing %s", old.path)
            remove(old)
        for old in expired_states(checkpoints, keep_last=training.keep_optimizer_last):
            log.info("removing the optimizer state of %s", old.path)
            strip_optimizer_state(old)
    except OSError as error:
        log.warning("old checkpoints could not be removed: %s", error)


def expired(checkpoints: Path, *, keep_last: int | None, keep_every: int | None) -> list[Checkpoint]:
    """The complete checkpoints that a run need not keep, oldest first.

    Kept are the newest `keep_last` (at least MIN_KEPT; None: all), and permanently those whose step is a multiple
    of `keep_every`.
    """
    if keep_last is None:
        return []
    old = all_complete(checkpoints)[: -max(keep_last, MIN_KEPT)]
    return [checkpoint for checkpoint in old if not keep_every or checkpoint.step % keep_every]


def expired_states(checkpoints: Path, *, keep_last: int | None) -> list[Checkpoint]:
    """The complete checkpoints that need not keep their optimizer state, oldest first.

    The newest `keep_last` (at least MIN_KEPT; None: all) of those that have it keep it.
    """
    if keep_last is None:
        return []
    having = [checkpoint for checkpoint in all_complete(checkpoints) if optimizer_layout(checkpoint)]
    return having[: -max(keep_last, MIN_KEPT)]


def remove(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint, so that a kill in between leaves nothing that looks like one."""
    doomed = checkpoint.path.with_name(checkpoint.path.name + EXPIRED_SUFFIX)
    checkpoint.path.rename(doomed)
    shutil.rmtree(doomed)


def strip_optimizer_state(checkpoint: Checkpoint) -> None:
    """Replace a checkpoint by one without optimizer state, with the same weights, step and data position."""
    smaller = optimizer_state.write_stripped(checkpoint)
    doomed = checkpoint.path.with_name(checkpoint.path.name + EXPIRED_SUFFIX)
    checkpoint.path.rename(doomed)
    smaller.rename(checkpoint.path)
    files.fsync_path(checkpoint.path.parent)
    shutil.rmtree(doomed)


def remove_leftovers(checkpoints: Path) -> None:
    """Finish removals and replacements that a kill interrupted."""
    for smaller in checkpoints.glob(f"*{SMALLER_SUFFIX}"):
        replaced = smaller.with_name(smaller.name.removesuffix(SMALLER_SUFFIX))
        if replaced.exists():
            shutil.rmtree(smaller)
        else:
            smaller.rename(replaced)
    for doomed in checkpoints.glob(f"*{EXPIRED_SUFFIX}"):
        shutil.rmtree(doomed)
