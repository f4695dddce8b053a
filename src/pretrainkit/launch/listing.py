"""The experiments of a folder with their states, for pretrain.py --list.

Small files are read, and the ends of long ones.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.errors import EXIT_DONE, EXIT_STOPPED_AFTER_SAVING, PretrainkitError, RequestError
from pretrainkit.jobs.scheduler import run_here
from pretrainkit.jobs.submit import SubmittedJob, read_records
from pretrainkit.run import json_lines
from pretrainkit.run.attempts import read_attempts
from pretrainkit.run.folder import OUTCOME_FILE, RunFolder
from pretrainkit.run.progress import read_attempt

SIGN_OF_LIFE_S = 60.0
"""The process that starts the ranks writes their records once a second or so."""


@dataclass(frozen=True)
class ListedExperiment:
    """One experiment."""

    name: str
    state: str
    """starting, running, queued, done, stopped, failed, lost (killed without a word) or new (nothing was started)."""
    step: int
    max_steps: int | None
    loss: float | None
    """The last that was recorded."""
    val_loss: float | None
    job_id: str | None
    """Of the newest job, with a scheduler."""


def list_experiments(experiments_dir: Path) -> list[ListedExperiment]:
    """The experiments in a folder, by name. Raises RequestError when there is no such folder."""
    if not experiments_dir.is_dir():
        raise RequestError("no such folder", where=str(experiments_dir), needed="a folder of experiments")
    folders = (RunFolder(path) for path in sorted(experiments_dir.iterdir()) if path.is_dir())
    return [_listed(folder) for folder in folders if folder.has_started or folder.run_file.exists()]


def _listed(folder: RunFolder) -> ListedExperiment:
    tail = json_lines.read_records(folder.metrics, only_tail=True)
    attempts, jobs = read_attempts(folder), read_records(folder.jobs)
    job = (jobs[-1].successor or jobs[-1]) if jobs else None
    step = max((attempt.last_step for attempt in attempts), default=0)
    max_steps = files.read_object(folder.run_file).get("max_steps")
    return ListedExperiment(
        name=folder.path.name,
        state=_state(folder, job, is_done=max_steps is not None and step >= max_steps),
        step=step,
        max_steps=max_steps,
        loss=_last(tail, "loss"),
        val_loss=_last(tail, "val_loss"),
        job_id=job.job_id if job else None,
    )


def _last(records: list[dict[str, Any]], field: str) -> float | None:
    return next((record[field] for record in reversed(records) if "event" not in record and field in record), None)


def _state(folder: RunFolder, job: SubmittedJob | None, *, is_done: bool) -> str:
    logs = folder.attempt_folders()
    outcome = files.read_object(logs[-1] / OUTCOME_FILE) if logs else {}
    if logs and not outcome:
        now = read_attempt(logs[-1])
        age_s = now.age_s if now else time.time() - logs[-1].stat().st_mtime  # there is none before the ranks start
        if age_s < SIGN_OF_LIFE_S:
            return "running" if now else "starting"
    if job and not Path(job.exit_files[0]).is_file():
        return _state_of_job(job)
    if is_done:
        return "done"
    code = outcome.get("exit_code")
    if code is None and job:
        code = int(Path(job.exit_files[0]).read_text(encoding="ascii"))
    if code in (EXIT_DONE, EXIT_STOPPED_AFTER_SAVING):
        return "stopped"
    if code is not None:
        return f"failed ({code})"
    return "lost" if logs else "new"


def _state_of_job(job: SubmittedJob) -> str:
    """Of a job without an exit code: its scheduler knows whether it is still there."""
    try:
        is_alive = job.is_alive(run_here)
    except PretrainkitError:  # not on this machine, or it doesn't answer
        return "running?" if Path(job.logs[0]).is_file() else "queued?"
    if not is_alive:
        return "lost"
    return "running" if Path(job.logs[0]).is_file() else "queued"


def describe_experiments(found: list[ListedExperiment]) -> str:
    """As an aligned table, without a newline at the end."""
    head = ["experiment", "state", "step", "loss", "held-out", "job"]
    rows = [
        [
            each.name,
            each.state,
            f"{each.step}/{each.max_steps or '?'}",
            "" if each.loss is None else f"{each.loss:.4f}",
            "" if each.val_loss is None else f"{each.val_loss:.4f}",
            each.job_id or "",
        ]
        for each in found
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def print_experiments(experiments_dir: Path, *, as_json: bool) -> int:
    """Print the experiments in a folder; gives the exit code."""
    found = list_experiments(experiments_dir)
    print(json.dumps([asdict(each) for each in found], indent=2) if as_json else describe_experiments(found))
    return EXIT_DONE
