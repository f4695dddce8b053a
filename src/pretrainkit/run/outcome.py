"""How an attempt ended, written by its node process: a file, since no executor passes exit codes on."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pretrainkit import files
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING
from pretrainkit.logs import get_logger, masked
from pretrainkit.run.folder import OUTCOME_FILE, rank_log_names
from pretrainkit.units import format_bytes

MIN_FREE_BYTES = 1 << 26
"""A disk with less free space counts as full (assumed: less than any file of a checkpoint that could matter)."""
_RESERVE, _RESERVED_BYTES = "outcome.reserve", 4096
_ERROR = "train.py: error: "
"""Begins the message that a rank ends with."""

log = get_logger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt."""

    exit_code: int
    """What pretrain.py ends with."""
    failed_rank: int | None = None
    """The first rank that failed."""
    reason: str = ""
    has_hung: bool = False
    """Whether no step ended within --hang_timeout: another start may go on where this one couldn't."""


def outcome_of(exit_codes: Mapping[int, int]) -> Outcome:
    """The outcome of an attempt whose ranks failed.

    Args:
        exit_codes: by rank, in the order in which torchrun saw them end; negative: killed by that signal.
            When the first rank fails, torchrun stops all others, so only the first one says why. It ends
            with 85 only after all have saved, if there was anything to save: they save together.
    """
    rank, code = next(iter(exit_codes.items()))
    if code == EXIT_STOPPED_AFTER_SAVING:
        return Outcome(code, rank, "stopped as asked")
    if code > 0:
        return Outcome(code, rank, f"rank {rank} failed with exit code {code}")
    name = signal.Signals(-code).name
    hint = ": out of memory is the usual cause" if -code == signal.SIGKILL else ""
    return Outcome(EXIT_FAILED, rank, f"rank {rank} was killed by {name}{hint}")


SUCCESS = Outcome(EXIT_DONE)


def reserve_outcome(log_dir: Path) -> None:
    """Take the disk space of an attempt's outcome: a full disk may be what ends it."""
    (log_dir / _RESERVE).write_bytes(b" " * _RESERVED_BYTES)


def write_outcome(log_dir: Path, outcome: Outcome) -> None:
    """Write an attempt's outcome atomically, into the reserved space where the disk is full."""
    reserve = log_dir / _RESERVE
    try:
        files.write_json(log_dir / OUTCOME_FILE, asdict(outcome))
    except OSError:
        content = json.dumps(asdict(replace(outcome, reason=outcome.reason[: _RESERVED_BYTES // 8]))).encode()
        if not reserve.exists():
            raise
        with reserve.open("r+b", buffering=0) as file:
            file.write(content.ljust(_RESERVED_BYTES))
        reserve.replace(log_dir / OUTCOME_FILE)
    reserve.unlink(missing_ok=True)


def with_cause(outcome: Outcome, log_dir: Path) -> Outcome:
    """The outcome of a rank that failed, with its own error message, or that the disk is full."""
    log_file = log_dir / rank_log_names(outcome.failed_rank or 0)[1]
    said = log_file.read_text(encoding="utf-8", errors="replace") if log_file.is_file() else ""
    cause = said.rpartition(_ERROR)[2].partition("\n")[0].strip() if _ERROR in said else ""
    free_bytes = shutil.disk_usage(log_dir).free
    if not cause and free_bytes < MIN_FREE_BYTES:
        cause = f"the disk of {log_dir} is full ({format_bytes(free_bytes)} are free)"
    return replace(outcome, reason=f"{outcome.reason}: {masked(cause)}") if cause else outcome


def read_outcome(log_dir: Path) -> Outcome:
    """An attempt's outcome; without the file its node process died before it could write one."""
    path = log_dir / OUTCOME_FILE
    if not path.is_file():
        return Outcome(
            EXIT_FAILED,
            None,
            f"the process that starts the ranks died, or could not write how it ended (a full disk?); see {log_dir}",
        )
    return Outcome(**files.read_json(path))


def log_outcome(outcome: Outcome, log_dir: Path, *, continued_by: str) -> int:
    """Log how an attempt ended, and what continues it if it was stopped; gives its exit code."""
    if outcome.exit_code == EXIT_DONE:
        log.info("done: %s", log_dir.parents[1])
    elif outcome.exit_code == EXIT_STOPPED_AFTER_SAVING:
        log.warning("stopped as asked; %s continues it", continued_by)
    else:
        log.error("failed: %s; logs of all ranks in %s", masked(outcome.reason), log_dir)
    return outcome.exit_code
