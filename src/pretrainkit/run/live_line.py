"""The line at the bottom of a terminal that says what an attempt is doing now, below the log."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from pretrainkit.logs import LOGGER_NAME
from pretrainkit.run import progress
from pretrainkit.run.json_lines import read_records
from pretrainkit.run.progress import AttemptProgress
from pretrainkit.units import format_count, format_duration

_REFRESH_S = 0.5


@contextmanager
def live_line(
    read: Callable[[], AttemptProgress | None],
    max_steps: int,
    terminal: TextIO,
    *,
    metrics: Path,
    before: str = "starting",
) -> Iterator[BinaryIO]:
    """Show the line until the block ends; gives the stream for the log, which scrolls above the line.

    Without a terminal there is no line, and the stream is the one that was given.

    Args:
        read: gives what the attempt is doing; None while there is none.
        metrics: the run's records, of which the last step's loss and tokens/s are shown.
        before: what the line says while there is none.
    """
    if not terminal.isatty():
        yield terminal.buffer
        return
    tqdm.monitor_interval = 0  # no thread of its own
    bar = tqdm(file=terminal, bar_format="{desc}", leave=False, dynamic_ncols=True)
    ended = threading.Event()

    def refresh() -> None:
        idle_since_s = time.monotonic()
        while not ended.wait(_REFRESH_S):
            if found := read():
                idle_since_s = time.monotonic()
                bar.set_description_str(describe(found, max_steps, last_step(metrics)))
            else:
                bar.set_description_str(f"{before}  {time.monotonic() - idle_since_s:.0f} s")

    thread = threading.Thread(target=refresh, name="live line", daemon=True)
    thread.start()
    try:
        with logging_redirect_tqdm([logging.getLogger(LOGGER_NAME)]):
            yield cast(BinaryIO, _AboveLine(terminal))
    finally:
        ended.set()
        thread.join()
        bar.close()


def last_step(metrics: Path) -> dict[str, Any]:
    """The record of the last step in metrics.jsonl; empty before the first."""
    records = reversed(read_records(metrics, only_tail=True))
    return next((record for record in records if "loss" in record and "tokens_per_second" in record), {})


def describe(found: AttemptProgress, max_steps: int, last: dict[str, Any]) -> str:
    """What the line says: the phase with its seconds, or the step, with the age of one that is late, the loss and the
    tokens/s of the last record, the usual time of a step and the time left.
    """
    at = found.slowest
    if at.phase != progress.TRAINING:
        done = f"step {at.step}/{max_steps}  " if at.step else ""
        return f"{done}{at.phase}  {at.phase_s + found.age_s:.0f} s"
    words = [f"step {at.step}/{max_steps} ({at.step / max_steps:.0%})"]
    if (age_s := at.tick_s + found.age_s) > max(10.0, 3 * (found.step_time_s or 0.0)):
        words.append(f"no step for {age_s:.0f} s")
    if last:
        words += [f"loss {last['loss']:.4f}", f"{format_count(last['tokens_per_second'])} tokens/s"]
    if found.step_time_s is not None:
        left_s = (max_steps - at.step) * found.step_time_s
        words += [f"{format_duration(found.step_time_s, digits=2)} a step", f"{format_duration(left_s)} left"]
    return "  ".join(words)


class _AboveLine(io.RawIOBase):
    """Writes complete lines to a terminal with tqdm's lines out of the way."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal = terminal

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if data:
            with tqdm.external_write_mode(file=self._terminal):
                self._terminal.buffer.write(data)
                self._terminal.buffer.flush()
        return len(data)
