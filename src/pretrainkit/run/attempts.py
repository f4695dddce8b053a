"""attempts.jsonl: the starts, saves and stops of a run, and what follows from them for the next start.

metrics.jsonl has the same events in full, between the records of all steps; this file stays small enough for every rank
to read at each start. A line without an event has the last step that the attempt before it reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pretrainkit.run.folder import RunFolder
from pretrainkit.run.json_lines import JsonLinesWriter, read_records

EVENTS = START, SAVED, STOPPED, ROLLED_BACK = "start", "checkpoint", "stopped", "rollback"
"""Events of metrics.jsonl that are also in attempts.jsonl."""
_FIELDS = ("event", "time", "step", "mode", "world_size", "branch")


@dataclass(frozen=True)
class Attempt:
    """One start of a run, as recorded by its first rank."""

    start_step: int
    """Steps done before it."""
    last_step: int
    """The last step it recorded or saved; start_step when there is none."""
    was_stopped: bool = False
    """Whether it ended on a signal, at its time limit or by a rollback."""
    time: str = ""
    mode: str | None = None
    """As `pretrainkit.run.resume_plan` names it."""
    world_size: int | None = None


def read_attempts(folder: RunFolder) -> list[Attempt]:
    """Every attempt that was recorded, oldest first. Damaged lines are skipped."""
    records = read_records(records_of_attempts(folder))
    if folder.attempts.exists():  # how far the last attempt came is in metrics.jsonl alone
        tail = read_records(folder.metrics, only_tail=True)
        starts = [index for index, each in enumerate(tail, 1) if each.get("event") == START and "step" in each]
        records += tail[starts[-1] if starts else 0 :]
    attempts: list[Attempt] = []
    for record in records:
        event, step = record.get("event"), record.get("step")
        if not isinstance(step, int):
            continue
        if event == START:
            fields = {name: record[name] for name in ("time", "mode", "world_size") if name in record}
            attempts.append(Attempt(step, step, **fields))
        elif attempts and event in (None, SAVED, STOPPED, ROLLED_BACK):
            last = attempts[-1]
            reached, was_stopped = max(last.last_step, step), last.was_stopped or event in (STOPPED, ROLLED_BACK)
            attempts[-1] = replace(last, last_step=reached, was_stopped=was_stopped)
    return attempts


def records_of_attempts(folder: RunFolder) -> Path:
    """The file with the events of all attempts: metrics.jsonl for a run of a version before attempts.jsonl."""
    return folder.attempts if folder.attempts.exists() else folder.metrics


def has_saved(folder: RunFolder) -> bool:
    """Whether a checkpoint is recorded, even by a torn line: it is written after the checkpoint."""
    path = records_of_attempts(folder)
    return path.exists() and b'"event": "checkpoint"' in path.read_bytes()


def last_saved_step(folder: RunFolder) -> int | None:
    """The step of the newest checkpoint that is recorded, whether it still exists or not."""
    records = read_records(records_of_attempts(folder))
    steps = (record.get("step") for record in reversed(records) if record.get("event") == SAVED)
    return next((step for step in steps if isinstance(step, int)), None)


def restarts_without_progress(attempts: Sequence[Attempt]) -> int:
    """Restarts in a row, up to now, that reached no step beyond those of earlier attempts.

    An attempt that was stopped before it could is not counted.
    """
    furthest, count = -1, 0
    for attempt in attempts:
        if attempt.last_step > furthest:
            count = 0
        elif not attempt.was_stopped:
            count += 1
        furthest = max(furthest, attempt.last_step)
    return count


class AttemptLog:
    """Writes attempts.jsonl from the records of metrics.jsonl; only the first rank has one."""

    def __init__(self, folder: RunFolder) -> None:
        attempts = read_attempts(folder) if folder.attempts.exists() else []
        self._last_step = attempts[-1].last_step if attempts else None
        earlier = [] if folder.attempts.exists() else read_records(folder.metrics)
        self._file = JsonLinesWriter(folder.attempts)
        for record in earlier:  # of versions that wrote no attempts.jsonl
            self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        """Append a record of metrics.jsonl if it is an event of an attempt; note the step of others."""
        event, step = record.get("event"), record.get("step")
        if event == START and self._last_step is not None:
            self._file.append({"step": self._last_step})
        if event in EVENTS:
            self._file.append({name: record[name] for name in _FIELDS if record.get(name) is not None})
        if isinstance(step, int) and event in (None, *EVENTS):
            self._last_step = step if event == START else max(step, self._last_step or 0)
