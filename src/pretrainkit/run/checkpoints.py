"""Which checkpoint a start continues from, decided from the files alone.

A checkpoint is a folder `step_<n>` below an experiment's `checkpoints/`. Its commit mark, `complete.json`, is
written last, by rename, and lists every file with its size; a folder without a mark, or one that contradicts
it, is not a checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.errors import CheckpointError
from pretrainkit.logs import get_logger

CHECKPOINTS = "checkpoints"
"""Folder of an experiment's checkpoints."""
BEGIN_ANEW = "to begin anew move the experiment's folder away, or take another --experiment"
"""What can be done where a run is lost."""
COMMIT_MARK = "complete.json"
DATA = "dataset"
"""Of a commit mark: which data the attempt that saved it learnt (`pretrainkit.run.folder` reads it)."""
INCOMPLETE_SUFFIX = ".incomplete"
EXPIRED_SUFFIX = ".expired"
SMALLER_SUFFIX = ".smaller"
"""Of a checkpoint that is to replace the one whose name it has."""
MIN_KEPT = 2
"""Complete checkpoints that are never removed: should the newest turn out bad, there is another."""
_PREFIX = "step_"
_STATE = b"optimizer.state."
"""How names of the optimizer's tensors begin."""
_LAYOUTS = {"distributed": _STATE + b"param.", "bf16": _STATE + b"fp32_param."}
"""What Megatron's optimizers call the fp32 weights that they keep; without the distributed one, fp32 training keeps
none."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """Training samples used so far; the next step reads on from there."""
    global_batch_size: int | None = None
    """Of the attempt that saved it; None where its mark doesn't tell."""
    optimizer_was_reset: bool = False
    """Whether that attempt was asked to drop the optimizer's moments, and has done so."""
    has_optimizer_state: bool = True
    """False when its optimizer state was left out to save room; see the function of this name."""
    num_bytes: int = field(default=0, compare=False)
    data: Mapping[str, Any] | None = field(default=None, compare=False)
    """What run.json of that attempt said of the data, where --allow_data_change lets it change; None in older marks."""


def checkpoint_name(step: int) -> str:
    """The folder's name for a checkpoint after `step` optimizer steps."""
    return f"{_PREFIX}{step:08d}"


def commit(
    folder: Path,
    *,
    step: int,
    consumed_samples: int,
    global_batch_size: int | None = None,
    optimizer_was_reset: bool = False,
    has_optimizer_state: bool = True,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Declare a fully written checkpoint complete. One process does this, after all have written."""
    written = _files(folder)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in written}
    for path in (*written, *{path.parent for path in written}, folder):
        files.fsync_path(path)
    files.write_json(
        folder / COMMIT_MARK,
        {
            "step": step,
            "consumed_samples": consumed_samples,
            "global_batch_size": global_batch_size,
            "optimizer_was_reset": optimizer_was_reset,
            "has_optimizer_state": has_optimizer_state,
            DATA: data,
            "file_sizes": dict(sorted(sizes.items())),
        },
    )


def read(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`; CheckpointError says what is missing when it is not complete."""
    mark = folder / COMMIT_MARK
    try:
        content = files.read_json(mark)
        checkpoint = Checkpoint(
            folder,
            content["step"],
            content["consumed_samples"],
            content.get("global_batch_size"),
            content.get("optimizer_was_reset", False),
            content.get("has_optimizer_state", True),
            sum(content["file_sizes"].values()),
            content.get(DATA),
        )
        sizes = content["file_sizes"].items()
        if checkpoint_name(checkpoint.step) != folder.name.removesuffix(SMALLER_SUFFIX) or not sizes:
            raise ValueError(f"of step {checkpoint.step}, {len(sizes)} files")
        if not isinstance(checkpoint.consumed_samples, int):
            raise TypeError(f"consumed_samples {checkpoint.consumed_samples!r}")
    except FileNotFoundError:
        raise CheckpointError("not finished: it has no commit mark", where=str(mark)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"unreadable commit mark ({error!r})", where=str(mark)) from None
    for name, size in sizes:
        try:
            found = (folder / name).stat().st_size
        except OSError:  # also where retention removes it just now
            found = None
        if found != size:
            has = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(f"{name} {has}", needed=f"{size} bytes, as written", where=str(folder))
    return checkpoint


def has_optimizer_state(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint holds the optimizer's moments."""
    return optimizer_layout(checkpoint) is not None


def optimizer_layout(checkpoint: Checkpoint) -> str | None:
    """Whose optimizer state a checkpoint holds, which no other kind can read: `distributed`, or of bf16 or fp32
    training without it; None: none. The names of its tensors, which stand in its index, tell.
    """
    if not checkpoint.has_optimizer_state:
        return None
    index = (checkpoint.path / "weights" / ".metadata").read_bytes()
    if _STATE not in index:
        return None
    return next((layout for layout, name in _LAYOUTS.items() if name in index), "fp32")


def newest_complete(checkpoints: Path) -> Checkpoint | None:
    """The checkpoint to continue from, or None when the run has not saved yet.

    Incomplete folders newer than it are passed over with a warning. When checkpoints were complete once, put aside
    since or not, and none is now, CheckpointError: starting afresh over them would lose the run without a word.
    """
    problems = []
    for folder in sorted(_folders(checkpoints), reverse=True):
        try:
            checkpoint = read(folder)
        except CheckpointError as problem:
            problems.append(problem)
            log.warning("passing over an incomplete checkpoint: %s", problem)
        else:
            return checkpoint
    # One folder without a mark was being written when the run died: nothing counted on it yet.
    marked = {mark.parent.name for mark in checkpoints.glob(f"{_PREFIX}*/{COMMIT_MARK}")}
    lost = {name for name in marked if not name.endswith(EXPIRED_SUFFIX)}
    if lost or len(problems) > 1:
        number = len(lost | {folder.name for folder in _folders(checkpoints)})
        raise CheckpointError(
            f"none of {number} checkpoints is complete; the newest: {problems[0] if problems else max(lost)}",
            needed="at least one complete checkpoint to continue from",
            action=f"restore one from a backup; {BEGIN_ANEW}",
            where=str(checkpoints),
        )
    return None


def has_begun_saving(checkpoints: Path) -> bool:
    """Whether there is a checkpoint, complete or not."""
    return bool(_folders(checkpoints))


def quarantine_incomplete(checkpoints: Path) -> list[Path]:
    """Rename incomplete checkpoint folders, so that they are neither loaded nor in the way of new ones."""
    moved = []
    for folder in _folders(checkpoints):
        try:
            read(folder)
        except CheckpointError:
            target = folder.with_name(folder.name + INCOMPLETE_SUFFIX)
            number = 1
            while target.exists():
                number += 1
                target = folder.with_name(f"{folder.name}{INCOMPLETE_SUFFIX}{number}")
            folder.rename(target)
            moved.append(target)
    return moved


def all_complete(checkpoints: Path) -> list[Checkpoint]:
    """Every complete checkpoint, oldest first; others are passed over: quarantine is a start's business."""
    complete = []
    for folder in sorted(_folders(checkpoints)):
        try:
            complete.append(read(folder))
        except CheckpointError:
            continue
    return complete


def expired(checkpoints: Path, *, keep_last: int | None, keep_every: int | None) -> list[Checkpoint]:
    """The complete checkpoints that a run need not keep, oldest first.

    Kept are the newest `keep_last` (at least MIN_KEPT; None: all), and for ever those whose step is a multiple
    of `keep_every`.
    """
    if keep_last is None:
        return []
    old = all_complete(checkpoints)[: -max(keep_last, MIN_KEPT)]
    return [checkpoint for checkpoint in old if not keep_every or checkpoint.step % keep_every]


def remove(checkpoint: Checkpoint) -> None:
    """Remove a checkpoint, so that a kill in between leaves nothing that looks like one."""
    doomed = checkpoint.path.with_name(checkpoint.path.name + EXPIRED_SUFFIX)
    checkpoint.path.rename(doomed)
    shutil.rmtree(doomed)


def replace(checkpoint: Checkpoint, other: Path) -> None:
    """Let another complete folder, named as the checkpoint with SMALLER_SUFFIX, take its place."""
    doomed = checkpoint.path.with_name(checkpoint.path.name + EXPIRED_SUFFIX)
    checkpoint.path.rename(doomed)
    other.rename(checkpoint.path)
    files.fsync_path(checkpoint.path.parent)
    shutil.rmtree(doomed)


def remove_leftovers(checkpoints: Path) -> None:
    """Finish removals and replacements that a kill cut short."""
    for smaller in checkpoints.glob(f"{_PREFIX}*{SMALLER_SUFFIX}"):
        place = smaller.with_name(smaller.name.removesuffix(SMALLER_SUFFIX))
        if place.exists():
            shutil.rmtree(smaller)
        else:
            smaller.rename(place)
    for doomed in checkpoints.glob(f"{_PREFIX}*{EXPIRED_SUFFIX}"):
        shutil.rmtree(doomed)


def _folders(checkpoints: Path) -> list[Path]:
    return [path for path in checkpoints.glob(f"{_PREFIX}*") if path.is_dir() and path.name[len(_PREFIX) :].isdigit()]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != COMMIT_MARK]
