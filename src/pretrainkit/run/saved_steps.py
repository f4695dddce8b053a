"""Chooses checkpoints of one training run by their steps: of an experiment, or of a folder of another tool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pretrainkit.checkpoint.merge import step_in_name
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.logs import get_logger
from pretrainkit.run.checkpoints import checkpoint_folders, read
from pretrainkit.run.folder import COMMIT_MARK, RunFolder

log = get_logger(__name__)


def saved_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, ascending: those of an experiment that are complete, or else every folder whose
    name states a step. `folder` is the experiment, or the folder that they are in.
    """
    inside = RunFolder(folder).checkpoints
    is_experiment = inside.is_dir()
    inside = inside if is_experiment else folder
    found: dict[int, Path] = {}
    ours = checkpoint_folders(inside)
    if is_experiment or any((path / COMMIT_MARK).is_file() for path in ours):
        for path in ours:
            try:
                found[read(path).step] = path
            except CheckpointError as problem:
                log.warning("skipping an incomplete checkpoint: %s", problem)
        return found
    for path in inside.iterdir() if inside.is_dir() else ():
        if path.is_dir() and (step := step_in_name(path)) is not None:
            found[step] = path
    return dict(sorted(found.items()))


def choose_checkpoints(folder: Path, *, last: int | None = None, steps: Sequence[int] = ()) -> list[Path]:
    """The newest `last` checkpoints of a run, or those of some steps; oldest first.

    Raises RequestError with the steps that are there when it has fewer, or none of a step.
    """
    saved = saved_checkpoints(folder)
    there = f"{len(saved)} complete checkpoints" + (f": steps {', '.join(map(str, saved))}" if saved else "")
    if last is not None:
        if not 2 <= last <= len(saved):
            raise RequestError(
                f"--last {last}, and {there}",
                where=str(folder),
                needed=f"2 to {len(saved)}"
                if len(saved) > 1
                else "an experiment with two complete checkpoints or more",
                action="train with a larger --keep_last to keep more",
            )
        return list(saved.values())[-last:]
    if absent := [str(step) for step in steps if step not in saved]:
        raise RequestError(f"no checkpoint of step {', '.join(absent)}; {there}", where=str(folder))
    return [saved[step] for step in sorted(set(steps))]
