"""What became of an experiment, over all its attempts, read from its folder."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.run import restarts
from pretrainkit.run.checkpoints import Checkpoint, all_complete, newest_complete, optimizer_layout
from pretrainkit.run.folder import OUTCOME_FILE, RunFolder
from pretrainkit.units import format_count

RATE_STEPS = 100
"""The speed that is shown is the median of so many last records."""
_STEP_FIELDS = {"step", "loss", "learning_rate"}


@dataclass(frozen=True)
class Start:
    """One start of the run, and how far it came."""

    time: str
    mode: str | None
    """As `pretrainkit.run.resume_plan` names it; None in records that don't tell."""
    first_step: int
    """Steps done before it."""
    last_step: int
    world_size: int | None


@dataclass(frozen=True)
class AttemptLogs:
    """An attempt's log folder and its end; no exit code: it runs, or what started it died."""

    folder: str
    exit_code: int | None
    reason: str


@dataclass(frozen=True)
class ScheduledJob:
    """A job of a scheduler that was submitted for the run; no exit code: it waits, runs, or was killed."""

    scheduler: str
    job_id: str
    log: str
    exit_code: int | None


@dataclass(frozen=True)
class Point:
    """An optimizer step; one that was done again after a restart counts as it was done last."""

    step: int
    loss: float | None
    learning_rate: float
    tokens_per_second: float
    """NaN where its record lacks it."""


@dataclass(frozen=True)
class History:
    """All that is known of an experiment's course."""

    experiment: str
    max_steps: int | None
    steps: tuple[Point, ...]
    """By step, each once."""
    num_replayed_steps: int
    """Records of steps that a later attempt did again."""
    validation: tuple[tuple[int, float | None], ...]
    """(step, held-out loss), each step once."""
    starts: tuple[Start, ...]
    idle_restarts: int
    """Restarts in a row, up to now, without a new step."""
    bad_steps: tuple[int, ...]
    """Steps with a bad loss (event bad_loss)."""
    missed_saves: tuple[int, ...]
    """Steps whose checkpoint could not be written (event missed_save)."""
    newest_checkpoint: str | None
    num_checkpoints: int
    num_with_optimizer_state: int
    """Of the complete ones."""
    checkpoint_problem: str
    """Why there is none to continue from, where there should be."""
    logs: tuple[AttemptLogs, ...]
    jobs: tuple[ScheduledJob, ...]
    last_record: dict[str, Any]
    """The newest training record in full."""

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
            "steps_done": max((start.last_step for start in self.starts), default=last.step if last else 0),
            "max_steps": self.max_steps,
            "tokens": self.last_record.get("tokens"),
            "loss": last.loss if last else None,
            "val_loss": self.validation[-1][1] if self.validation else None,
            "val_loss_step": self.validation[-1][0] if self.validation else None,
            "learning_rate": last.learning_rate if last else None,
            "tokens_per_second": self.tokens_per_second,
            "tflops_per_rank": self.last_record.get("tflops_per_rank"),
            "mfu": self.last_record.get("mfu"),
            "starts": [asdict(start) for start in self.starts],
            "restarts": max(0, len(self.starts) - 1),
            "idle_restarts": self.idle_restarts,
            "replayed_steps": self.num_replayed_steps,
            "bad_steps": list(self.bad_steps),
            "missed_saves": list(self.missed_saves),
            "newest_checkpoint": self.newest_checkpoint,
            "complete_checkpoints": self.num_checkpoints,
            "with_optimizer_state": self.num_with_optimizer_state,
            "checkpoint_problem": self.checkpoint_problem,
            "logs": [asdict(log) for log in self.logs],
            "jobs": [asdict(job) for job in self.jobs],
        }

    def describe(self) -> str:
        """The summary for people: aligned lines, without a newline at the end."""
        summary = self.summary()
        loss, held_out, rate = summary["loss"], summary["val_loss"], summary["tokens_per_second"]
        mfu = summary["mfu"]
        lines = [
            ("experiment", self.experiment),
            ("steps", f"{summary['steps_done']} of {self.max_steps or 'unknown'}, {_count(summary['tokens'])} tokens"),
            ("loss", "none" if loss is None else f"{loss:.4f}"),
            ("held-out", "none" if held_out is None else f"{held_out:.4f} at step {summary['val_loss_step']}"),
            ("lr", "none" if summary["learning_rate"] is None else f"{summary['learning_rate']:.4g}"),
            ("speed", f"{_count(rate)} tokens/s" + ("" if mfu is None else f", MFU {mfu:.1%}")),
            (
                "restarts",
                f"{summary['restarts']}, {self.idle_restarts} of the last in a row without a new step; "
                f"{self.num_replayed_steps} steps done again",
            ),
            *(
                (
                    "start",
                    f"{start.time}  {start.mode or ''}  steps {start.first_step} -> {start.last_step}  "
                    f"{start.world_size or '?'} ranks",
                )
                for start in self.starts
            ),
            ("bad steps", ", ".join(map(str, self.bad_steps)) or "none"),
            ("no save", ", ".join(map(str, self.missed_saves)) or "none"),
            ("checkpoint", self.newest_checkpoint or self.checkpoint_problem or "none"),
            ("", f"{self.num_checkpoints} complete, {self.num_with_optimizer_state} with optimizer state"),
            *(
                (
                    "logs",
                    f"{log.folder}  {'no outcome' if log.exit_code is None else f'exit code {log.exit_code}'}"
                    f"{f', {log.reason}' if log.reason else ''}",
                )
                for log in self.logs
            ),
            *(
                (
                    "job",
                    f"{job.scheduler} {job.job_id}  log {job.log}  "
                    f"{'no exit code' if job.exit_code is None else f'exit code {job.exit_code}'}",
                )
                for job in self.jobs
            ),
        ]
        return "\n".join(f"{name:<10} {value}" for name, value in lines)


def read_history(experiment: Path) -> History:
    """Read an experiment's folder. Raises RequestError when nothing of it has started."""
    metrics = experiment / "metrics.jsonl"
    if not metrics.is_file() and not (experiment / "logs").is_dir() and not (experiment / "jobs").is_dir():
        raise RequestError(
            "no metrics.jsonl, logs or jobs here",
            needed="the folder of an experiment that has started",
            where=str(experiment),
        )
    records = _records(metrics)
    trained = [record for record in records if record.keys() >= _STEP_FIELDS and "event" not in record]
    by_step = {record["step"]: record for record in trained}
    validation = {record["step"]: record["val_loss"] for record in records if record.keys() >= {"step", "val_loss"}}
    checkpoints = RunFolder(experiment).checkpoints
    newest, problem = None, ""
    try:
        newest = newest_complete(checkpoints)
    except CheckpointError as error:
        problem = str(error)
    complete = all_complete(checkpoints)
    return History(
        experiment=str(experiment),
        max_steps=_max_steps(experiment),
        steps=tuple(
            Point(step, record["loss"], record["learning_rate"], record.get("tokens_per_second", math.nan))
            for step, record in sorted(by_step.items())
        ),
        num_replayed_steps=len(trained) - len(by_step),
        validation=tuple(sorted(validation.items())),
        starts=tuple(
            Start(
                attempt.record.get("time", ""),
                attempt.record.get("mode"),
                attempt.start_step,
                attempt.last_step,
                attempt.record.get("world_size"),
            )
            for attempt in restarts.attempts(metrics)
        ),
        idle_restarts=restarts.idle_restarts(metrics),
        bad_steps=_steps_of("bad_loss", records),
        missed_saves=_steps_of("missed_save", records),
        newest_checkpoint=str(newest.path) if newest else None,
        num_checkpoints=len(complete),
        num_with_optimizer_state=sum(map(_has_optimizer_state, complete)),
        checkpoint_problem=problem,
        logs=tuple(_logs(experiment)),
        jobs=tuple(_jobs(experiment)),
        last_record=trained[-1] if trained else {},
    )


def _has_optimizer_state(checkpoint: Checkpoint) -> bool:
    try:
        return optimizer_layout(checkpoint) is not None
    except OSError:  # retention removes it just now
        return False


def _records(metrics: Path) -> list[dict[str, Any]]:
    if not metrics.is_file():
        return []
    with metrics.open("rb") as file:
        return [record for line in file if (record := restarts.whole_record(line))]


def _steps_of(event: str, records: list[dict[str, Any]]) -> tuple[int, ...]:
    return tuple(sorted({record["step"] for record in records if record.get("event") == event and "step" in record}))


def _max_steps(experiment: Path) -> int | None:
    try:
        return int(files.read_json(experiment / "run.json")["max_steps"])
    except (OSError, ValueError, KeyError):
        return None


def _jobs(experiment: Path) -> list[ScheduledJob]:
    """The jobs that pretrain.py has recorded (`pretrainkit.jobs.submit`)."""
    records = experiment / "jobs" / "jobs.jsonl"
    jobs = []
    for record in _records(records) if records.is_file() else []:
        exit_file = Path(record["exit_files"][0])
        code = int(exit_file.read_text(encoding="ascii")) if exit_file.is_file() else None
        jobs.append(ScheduledJob(record["scheduler"], record["job_id"], record["logs"][0], code))
    return jobs


def _logs(experiment: Path) -> list[AttemptLogs]:
    logs = []
    for folder in RunFolder(experiment).attempt_folders():
        try:
            outcome = files.read_json(folder / OUTCOME_FILE)
        except (OSError, ValueError):
            outcome = {}
        logs.append(AttemptLogs(str(folder), outcome.get("exit_code"), outcome.get("reason", "")))
    return logs


def _count(number: float | None) -> str:
    return "no" if number is None else format_count(number)
