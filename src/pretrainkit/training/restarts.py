"""Restarts that lead nowhere: a run that fails again and again at the same step stops for a person to look."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import PretrainkitError

_START = b'{"event": "start"'
_STOPPED = b'{"event": "stopped"'
_SAVED = b'{"event": "checkpoint"'
"""How lines of these events begin in metrics.jsonl (`pretrainkit.training.records`)."""


@dataclass(frozen=True)
class Attempt:
    """One start of a run, as its records tell."""

    start_step: int
    """Steps done before it."""
    last_step: int
    """The last step it recorded; start_step when it made none."""
    was_stopped: bool = False
    """Whether it ended because it was asked to."""


def attempts(metrics: Path) -> list[Attempt]:
    """Every attempt in a metrics.jsonl. Only the lines around the starts are parsed: a long file takes no time."""
    if not metrics.exists() or not metrics.stat().st_size:
        return []
    with metrics.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        starts = []
        position = 0 if content[: len(_START)] == _START else content.find(b"\n" + _START) + 1
        while content[position : position + len(_START)] == _START:
            if content.find(b"\n", position) < 0:
                break  # torn by a kill
            starts.append(position)
            found = content.find(b"\n" + _START, position)
            if found < 0:
                break
            position = found + 1
        ends = [*starts[1:], len(content)]
        return [_attempt(content, begin, end) for begin, end in zip(starts, ends, strict=False)]


def last_saved_step(metrics: Path) -> int | None:
    """The step of the newest checkpoint that a metrics.jsonl tells of; None when it tells of none."""
    if not metrics.exists() or not metrics.stat().st_size:
        return None
    with metrics.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        begin = content.rfind(_SAVED)
        end = content.find(b"\n", begin)
        return None if begin < 0 or end < 0 else int(json.loads(content[begin:end])["step"])


def _attempt(content: mmap.mmap, begin: int, end: int) -> Attempt:
    first_line_end = content.find(b"\n", begin, end)
    start_step = json.loads(content[begin:first_line_end])["step"]
    position, was_stopped = end, False
    while (line_begin := content.rfind(b"\n", begin, position - 1) + 1) > begin:
        was_stopped |= content[line_begin : line_begin + len(_STOPPED)] == _STOPPED
        if content[line_begin : line_begin + 8] == b'{"step":':
            try:
                return Attempt(start_step, json.loads(content[line_begin:position])["step"], was_stopped)
            except ValueError:
                pass  # torn by a kill
        position = line_begin
    return Attempt(start_step, start_step, was_stopped)


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
