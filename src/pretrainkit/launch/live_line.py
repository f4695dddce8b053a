"""The line at the bottom of a terminal that says what an attempt is doing now, below the log."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from tqdm import tqdm

from pretrainkit.run import progress
from pretrainkit.run.progress import AttemptProgress, read_attempt
from pretrainkit.units import format_duration

_REFRESH_S = 0.5


@contextmanager
def live_line(log_dir: Path, max_steps: int, terminal: TextIO) -> Iterator[BinaryIO]:
    """Show the line until the block ends; gives the stream for the log, which scrolls above the line.

    Without a terminal there is no line, and the stream is the one that was given.
    """
    if not terminal.isatty():
        yield terminal.buffer
        return
    tqdm.monitor_interval = 0  # no thread of its own
    bar = tqdm(file=terminal, bar_format="{desc}", leave=False, dynamic_ncols=True)
    ended, began_s = threading.Event(), time.monotonic()

    def refresh() -> None:
        while not ended.wait(_REFRESH_S):
            found = read_attempt(log_dir)
            bar.set_description_str(describe(found, max_steps, time.monotonic() - began_s))

    thread = threading.Thread(target=refresh, name="live line", daemon=True)
    thread.start()
    try:
        yield cast(BinaryIO, _AboveLine(terminal))
    finally:
        ended.set()
        thread.join()
        bar.close()


def describe(found: AttemptProgress | None, max_steps: int, elapsed_s: float) -> str:
    """What the line says: the step, the usual time of a step and the time left, or the phase with its seconds."""
    if found is None:
        return f"{progress.STARTING}  {elapsed_s:.0f} s"
    at = found.slowest
    if at.phase != progress.TRAINING:
        done = f"step {at.step}/{max_steps}  " if at.step else ""
        return f"{done}{at.phase}  {at.phase_s + found.age_s:.0f} s"
    words = [f"step {at.step}/{max_steps} ({at.step / max_steps:.0%})"]
    if found.step_time_s is not None:
        left_s = (max_steps - at.step) * found.step_time_s
        words += [f"{format_duration(found.step_time_s, digits=2)} a step", f"{format_duration(left_s)} left"]
    if (age_s := at.tick_s + found.age_s) > max(10.0, 3 * (found.step_time_s or 0.0)):
        words.append(f"no step for {age_s:.0f} s")
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
