"""Restarts that lead nowhere: a run that fails again and again at the same step stops for a person to look."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import PretrainkitError

_START = b'{"event": "start"'
_STOPPED = b'{"event": "stopped"'
_SAVED = b'{"event": "checkpoint"'
_TRAINED = b'{"step":'
"""How lines of these events begin in metrics.jsonl (`pretrainkit.run.metrics`)."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run, as its records tell."""

    start_step: int
    """Steps done before it."""
    last_step: int
    """The last step it recorded or saved; start_step when it made none."""
    was_stopped: bool = False
    """Whether it ended because it was asked to."""
    record: dict[str, Any] = field(default_factory=dict, compare=False)
    """The line of its start."""


def whole_record(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None for a damaged one, which every reader passes over.

    The last line may be torn, or just being written, and a power cut may leave zeros anywhere.
    """
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _record_with_step(content: mmap.mmap, begin: int) -> dict[str, Any] | None:
    """The whole record that begins there, if it names a step."""
    record = whole_record(content[begin : content.find(b"\n", begin) + 1])
    return record if record and isinstance(record.get("step"), int) else None


def attempts(metrics: Path) -> list[Attempt]:
    """Every attempt in a metrics.jsonl. Only the lines around the starts are parsed: a long file takes no time."""
    if not metrics.exists() or not metrics.stat().st_size:
        return []
    with metrics.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        starts = {}
        position = 0 if content[: len(_START)] == _START else content.find(b"\n" + _START) + 1
        while content[position : position + len(_START)] == _START:
            if record := _record_with_step(content, position):
                starts[position] = record
            found = content.find(b"\n" + _START, position)
            if found < 0:
                break
            position = found + 1
        ends = [*list(starts)[1:], len(content)]
        return [_attempt(content, *start, end) for start, end in zip(starts.items(), ends, strict=False)]


def last_saved_step(metrics: Path) -> int | None:
    """The step of the newest checkpoint that a metrics.jsonl tells of; None when it tells of none."""
    if not metrics.exists() or not metrics.stat().st_size:
        return None
    with metrics.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        begin = len(content)
        while (begin := content.rfind(_SAVED, 0, begin)) >= 0:
            if record := _record_with_step(content, begin):
                return int(record["step"])
        return None


def has_saved(metrics: Path) -> bool:
    """Whether a metrics.jsonl tells of a checkpoint, if only by a torn line: the checkpoint is there before it."""
    return metrics.exists() and _SAVED in metrics.read_bytes()


def _attempt(content: mmap.mmap, begin: int, start: dict[str, Any], end: int) -> Attempt:
    position, was_stopped, last_step, is_trained = end, False, start["step"], False
    while not is_trained and (line_begin := content.rfind(b"\n", begin, position - 1) + 1) > begin:
        was_stopped |= content[line_begin : line_begin + len(_STOPPED)] == _STOPPED
        is_trained = content[line_begin : line_begin + len(_TRAINED)] == _TRAINED
        # A checkpoint may be of a later step than the last record, of which there is one in `log_interval` steps.
        if is_trained or content[line_begin : line_begin + len(_SAVED)] == _SAVED:
            record = _record_with_step(content, line_begin)
            last_step, is_trained = max(last_step, record["step"] if record else 0), is_trained and bool(record)
        position = line_begin
    return Attempt(start["step"], last_step, was_stopped, start)


def idle_restarts(metrics: Path) -> int:
    """Restarts in a row, up to now, that reached no step which an earlier attempt had not reached.

    One that was asked to stop before it could is not counted.
    """
    furthest, idle = -1, 0
    for attempt in attempts(metrics):
        if attempt.last_step > furthest:
            idle = 0
        elif not attempt.was_stopped:
            idle += 1
        furthest = max(furthest, attempt.last_step)
    return idle


def refuse_endless_restarts(run: ResolvedRun, last_good: str | None) -> None:
    """Raise PretrainkitError, which names the last good checkpoint, when `restart_limit` restarts brought no step."""
    experiment, limit = Path(run.experiment_dir), run.config.training.restart_limit
    idle = idle_restarts(experiment / "metrics.jsonl")
    if not limit or idle < limit:
        return
    furthest = max(attempt.last_step for attempt in attempts(experiment / "metrics.jsonl"))
    raise PretrainkitError(
        f"{idle} restarts in a row ended without a new step; the furthest was step {furthest}. "
        f"Last good checkpoint: {last_good or 'none'}",
        needed=f"less than {limit} such restarts (--restart_limit)",
        action=f"read the newest logs in {experiment / 'logs'}, mend the cause, and start once with --restart_limit 0",
        where=str(experiment),
    )
