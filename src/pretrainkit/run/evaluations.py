"""Evaluations of an experiment's checkpoints: which are due, which are done, and their scores as records.

evaluations/
  step_00000500.due          the checkpoint is to be evaluated (--eval_tasks)
  step_00000500.submitted    the same, and a job was submitted for it
  step_00000500.failed       it was tried, and isn't again
  step_00000500.json         its results, in full
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.run.folder import RUN_FILE, RunFolder, checkpoint_name, step_of
from pretrainkit.run.json_lines import JsonLinesWriter

EVENT = "evaluation"
"""Event of metrics.jsonl: step, and `tasks`: value by metric by task."""
DUE, SUBMITTED, FAILED = ".due", ".submitted", ".failed"
LONGEST_WAIT_S = 24 * 3600.0
"""A checkpoint that has waited for longer is not kept for its evaluation any more: its job may never run."""


def is_due(run: ResolvedRun, step: int) -> bool:
    """Whether the checkpoint of a step is to be evaluated: of every `eval_saves`-th save interval, and the last."""
    training = run.config.training
    interval = training.save_interval * training.eval_saves
    return bool(training.eval_tasks) and (step % interval == 0 or step == run.max_steps)


def mark_due(run: ResolvedRun, step: int) -> None:
    """Note that a checkpoint is to be evaluated."""
    folder = RunFolder.of(run).evaluations
    folder.mkdir(exist_ok=True)
    (folder / f"{checkpoint_name(step)}{DUE}").touch()


def pending(folder: RunFolder) -> list[Path]:
    """The checkpoints that are due and have no results yet, oldest first; some may have been removed."""
    marks = [path for suffix in (DUE, SUBMITTED) for path in folder.evaluations.glob(f"step_*{suffix}")]
    steps = {step for path in marks if (step := step_of(path.with_suffix(""))) is not None}
    return [folder.checkpoint(step) for step in sorted(steps) if not results_file(folder, step).is_file()]


def awaited(folder: RunFolder) -> set[Path]:
    """The checkpoints that are pending, but not for too long."""
    since_s = time.time() - LONGEST_WAIT_S
    marks = [path for suffix in (DUE, SUBMITTED) for path in folder.evaluations.glob(f"step_*{suffix}")]
    fresh = {folder.checkpoints / path.stem for path in marks if path.stat().st_mtime > since_s}
    return fresh & set(pending(folder))


def give_up(checkpoint: Path) -> None:
    """Don't evaluate a checkpoint again."""
    mark = RunFolder(checkpoint.parent.parent).evaluations / checkpoint.name
    for suffix in (DUE, SUBMITTED):
        if (path := mark.with_suffix(suffix)).exists():
            path.rename(mark.with_suffix(FAILED))


def results_file(folder: RunFolder, step: int) -> Path:
    """The results of a checkpoint."""
    return folder.evaluations / f"{checkpoint_name(step)}.json"


def record(checkpoint: Path, scores: dict[str, dict[str, float]], results: dict[str, Any]) -> bool:
    """Record the scores of an experiment's checkpoint; False: it belongs to none.

    Raises OSError when the record can't be written.
    """
    step, folder = step_of(checkpoint), RunFolder(checkpoint.absolute().parent.parent)
    if step is None or not (folder.path / RUN_FILE).is_file():
        return False
    before = files.read_object(results_file(folder, step)).get("results", {})
    folder.evaluations.mkdir(exist_ok=True)
    files.write_json(results_file(folder, step), {**results, "results": {**before, **results["results"]}})
    record = {"event": EVENT, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, "tasks": scores}
    if error := JsonLinesWriter(folder.metrics).append(record):
        raise error
    return True
