"""How an attempt ended, as its node process saw it: a file, since no executor passes exit codes on."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrainkit import files
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING

FILE_NAME = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt."""

    exit_code: int
    """What pretrain.py ends with."""
    failed_rank: int | None = None
    """The first rank that failed."""
    reason: str = ""


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended with anything but 0."""

    exit_code: int
    """Negative: killed by that signal."""
    time_s: int
    """When it was seen; ranks that were seen together have the same."""


def outcome_of(failures: Mapping[int, RankFailure]) -> Outcome:
    """The outcome of an attempt whose ranks failed; torchrun stops the others when the first one fails.

    85 counts only when no rank failed otherwise before or with it: ranks save together, and those that are
    still ending when the first has ended are killed without loss.
    """
    first_time_s = min(failure.time_s for failure in failures.values())
    first = {rank: failure for rank, failure in failures.items() if failure.time_s == first_time_s}
    saved = [rank for rank, failure in first.items() if failure.exit_code == EXIT_STOPPED_AFTER_SAVING]
    stopped_along = (EXIT_STOPPED_AFTER_SAVING, -signal.SIGTERM)
    wrong = [rank for rank, failure in first.items() if failure.exit_code not in stopped_along]
    if saved and not wrong:
        return Outcome(EXIT_STOPPED_AFTER_SAVING, saved[0], "stopped after saving")
    rank = min(wrong or first)
    code = first[rank].exit_code
    if code > 0:
        return Outcome(code, rank, f"rank {rank} failed with exit code {code}")
    name = signal.Signals(-code).name
    hint = ": out of memory is the usual cause" if -code == signal.SIGKILL else ""
    return Outcome(EXIT_FAILED, rank, f"rank {rank} was killed by {name}{hint}")


SUCCESS = Outcome(EXIT_DONE)


def write_outcome(log_dir: Path, outcome: Outcome) -> None:
    """Write an attempt's outcome atomically."""
    files.write_json(log_dir / FILE_NAME, asdict(outcome))


def read_outcome(log_dir: Path) -> Outcome:
    """An attempt's outcome; without the file its node process died before it could write one."""
    path = log_dir / FILE_NAME
    if not path.is_file():
        return Outcome(EXIT_FAILED, None, f"the process that starts the ranks died; see {log_dir}")
    return Outcome(**files.read_json(path))
