"""The course of an experiment over all its attempts, read from its folder."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.run.attempts import Attempt, read_attempts, restarts_without_progress
from pretrainkit.run.checkpoints import Checkpoint, all_complete, newest_complete, optimizer_layout
from pretrainkit.run.folder import JOBS_FILE, OUTCOME_FILE, RunFolder
from pretrainkit.run.json_lines import read_records
from pretrainkit.units import format_count

RATE_STEPS = 100
"""The speed that is shown is the median of so many last records."""
_STEP_FIELDS = {"step", "loss", "learning_rate"}


@dataclass(frozen=True)
class Point:
    """An optimizer step; the last record of it, where a restart repeated the step."""

    step: int
    loss: float | None
    learning_rate: float
    tokens_per_second: float
    """NaN where its record lacks it."""


@dataclass(frozen=True)
class History:
    """What the files of an experiment say about its course."""

    experiment: str
    max_steps: int | None
    steps: tuple[Point, ...]
    """By step, each once."""
    num_replayed_steps: int
    """Records of steps that a later attempt repeated."""
    validation: tuple[tuple[int, float | None], ...]
    """(step, held-out loss), each step once."""
    attempts: tuple[Attempt, ...]
    bad_steps: tuple[int, ...]
    """Steps with a bad loss (event bad_loss)."""
    missed_saves: tuple[int, ...]
    """Steps whose checkpoint could not be written (event missed_save)."""
    newest_checkpoint: str | None
    num_checkpoints: int
    num_with_optimizer_state: int
    """Of the complete ones."""
    checkpoint_problem: str
    """Why there is none to continue from, although there should be."""
    logs: tuple[dict[str, Any], ...]
    """Of each attempt: folder, exit_code (None: it runs, or the process that started it was killed), reason."""
    jobs: tuple[dict[str, Any], ...]
    """Of each job submitted: scheduler, job_id, log, exit_code (None: it waits, runs, or was killed)."""
    last_record: dict[str, Any]
    """The newest training record, with all its fields."""

    @property
    def tokens_per_second(self) -> float | None:
        """Median of the newest records."""
        rates = [point.tokens_per_second for point in self.steps[-RATE_STEPS:]]
        rates = [rate for rate in rates if not math.isnan(rate)]
        return statistics.median(rates) if rates else None

    def summary(self) -> dict[str, Any]:
        """The history without its curves, as a JSON object."""
        last = self.steps[-1] if self.steps else None
        return {
            "experiment": self.experiment,
            "steps_done": max((attempt.last_step for attempt in self.attempts), default=last.step if last else 0),
            "max_steps": self.max_steps,
            "tokens": self.last_record.get("tokens"),
            "loss": last.loss if last else None,
            "val_loss": self.validation[-1][1] if self.validation else None,
            "val_loss_step": self.validation[-1][0] if self.validation else None,
            "learning_rate": last.learning_rate if last else None,
            "tokens_per_second": self.tokens_per_second,
            "tflops_per_rank": self.last_record.get("tflops_per_rank"),
            "mfu": self.last_record.get("mfu"),
            "starts": [
                {
                    "time": attempt.time,
                    "mode": attempt.mode,
                    "first_step": attempt.start_step,
                    "last_step": attempt.last_step,
                    "world_size": attempt.world_size,
                }
                for attempt in self.attempts
            ],
            "restarts": max(0, len(self.attempts) - 1),
            "idle_restarts": restarts_without_progress(self.attempts),
            "replayed_steps": self.num_replayed_steps,
            "bad_steps": list(self.bad_steps),
            "missed_saves": list(self.missed_saves),
            "newest_checkpoint": self.newest_checkpoint,
            "complete_checkpoints": self.num_checkpoints,
            "with_optimizer_state": self.num_with_optimizer_state,
            "checkpoint_problem": self.checkpoint_problem,
            "logs": list(self.logs),
            "jobs": list(self.jobs),
        }

    def describe(self) -> str:
        """The summary for people: aligned lines, without a newline at the end."""
        summary = self.summary()
        loss, held_out, rate, mfu = (summary[name] for name in ("loss", "val_loss", "tokens_per_second", "mfu"))
        lines = [
            ("experiment", self.experiment),
            ("steps", f"{summary['steps_done']} of {self.max_steps or 'unknown'}, {_count(summary['tokens'])} tokens"),
            ("loss", "none" if loss is None else f"{loss:.4f}"),
            ("held-out", "none" if held_out is None else f"{held_out:.4f} at step {summary['val_loss_step']}"),
            ("lr", "none" if summary["learning_rate"] is None else f"{summary['learning_rate']:.4g}"),
            ("speed", f"{_count(rate)} tokens/s" + ("" if mfu is None else f", MFU {mfu:.1%}")),
            (
                "restarts",
                f"{summary['restarts']}, {summary['idle_restarts']} of the last in a row without a new step; "
                f"{self.num_replayed_steps} steps repeated",
            ),
        ]
        for each in self.attempts:
            steps = f"steps {each.start_step} -> {each.last_step}"
            lines.append(("start", f"{each.time}  {each.mode or ''}  {steps}  {each.world_size or '?'} ranks"))
        lines += [
            ("bad steps", ", ".join(map(str, self.bad_steps)) or "none"),
            ("no save", ", ".join(map(str, self.missed_saves)) or "none"),
            ("checkpoint", self.newest_checkpoint or self.checkpoint_problem or "none"),
            ("", f"{self.num_checkpoints} complete, {self.num_with_optimizer_state} with optimizer state"),
        ]
        for log in self.logs:
            code = "no outcome" if log["exit_code"] is None else f"exit code {log['exit_code']}"
            lines.append(("logs", f"{log['folder']}  {code}{', ' if log['reason'] else ''}{log['reason']}"))
        for job in self.jobs:
            code = "no exit code" if job["exit_code"] is None else f"exit code {job['exit_code']}"
            lines.append(("job", f"{job['scheduler']} {job['job_id']}  log {job['log']}  {code}"))
        return "\n".join(f"{name:<10} {value}" for name, value in lines)


def read_history(experiment: Path) -> History:
    """Read an experiment's folder. Raises RequestError when it was never started."""
    folder = RunFolder(experiment)
    if not (folder.metrics.is_file() or folder.logs.is_dir() or folder.jobs.is_dir()):
        raise RequestError(
            "no metrics.jsonl, logs or jobs here",
            needed="the folder of an experiment that was started",
            where=str(experiment),
        )
    records = read_records(folder.metrics)
    trained = [record for record in records if record.keys() >= _STEP_FIELDS and "event" not in record]
    by_step = {record["step"]: record for record in trained}
    validation = {record["step"]: record["val_loss"] for record in records if record.keys() >= {"step", "val_loss"}}
    newest, problem = None, ""
    try:
        newest = newest_complete(folder.checkpoints)
    except CheckpointError as error:
        problem = str(error)
    complete = all_complete(folder.checkpoints)
    return History(
        experiment=str(experiment),
        max_steps=_max_steps(folder),
        steps=tuple(
            Point(step, record["loss"], record["learning_rate"], record.get("tokens_per_second", math.nan))
            for step, record in sorted(by_step.items())
        ),
        num_replayed_steps=len(trained) - len(by_step),
        validation=tuple(sorted(validation.items())),
        attempts=tuple(read_attempts(folder)),
        bad_steps=_steps_of("bad_loss", records),
        missed_saves=_steps_of("missed_save", records),
        newest_checkpoint=str(newest.path) if newest else None,
        num_checkpoints=len(complete),
        num_with_optimizer_state=sum(map(_has_optimizer_state, complete)),
        checkpoint_problem=problem,
        logs=tuple(map(_outcome, folder.attempt_folders())),
        jobs=tuple(map(_job, read_records(folder.jobs / JOBS_FILE))),
        last_record=trained[-1] if trained else {},
    )


def _has_optimizer_state(checkpoint: Checkpoint) -> bool:
    try:
        return optimizer_layout(checkpoint) is not None
    except OSError:  # retention is removing it
        return False


def _steps_of(event: str, records: list[dict[str, Any]]) -> tuple[int, ...]:
    return tuple(sorted({record["step"] for record in records if record.get("event") == event and "step" in record}))


def _max_steps(folder: RunFolder) -> int | None:
    try:
        return int(files.read_json(folder.run_file)["max_steps"])
    except (OSError, ValueError, KeyError):
        return None


def _outcome(log_folder: Path) -> dict[str, Any]:
    try:
        outcome = files.read_json(log_folder / OUTCOME_FILE)
    except (OSError, ValueError):
        outcome = {}
    return {"folder": str(log_folder), "exit_code": outcome.get("exit_code"), "reason": outcome.get("reason", "")}


def _job(record: dict[str, Any]) -> dict[str, Any]:
    """A job as `pretrainkit.jobs.submit` recorded it, with its exit code."""
    exit_file = Path(record["exit_files"][0])
    code = int(exit_file.read_text(encoding="ascii")) if exit_file.is_file() else None
    return {
        "scheduler": record["scheduler"],
        "job_id": record["job_id"],
        "log": record["logs"][0],
        "exit_code": code,
    }


def _count(number: float | None) -> str:
    return "no" if number is None else format_count(number)
