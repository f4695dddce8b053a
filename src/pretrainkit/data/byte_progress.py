"""Progress of work over a known number of bytes or items: a bar on a terminal, occasional lines in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

from pretrainkit.logs import get_logger
from pretrainkit.units import format_duration

LOGGER = get_logger(__name__)
LINE_EVERY_S = 10.0
"""Minimum time between two lines in a log."""


class ByteProgress:
    """Counts up to `total`, from `initial`, which an earlier process did."""

    def __init__(self, total: int, name: str, unit: str = "B", initial: int = 0) -> None:
        self._total, self._name, self._unit = total, name, unit
        self._initial = self._done = initial
        self._began = self._last_line_at = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread: workers may still be forked
            self._bar = tqdm(total=total, initial=initial, unit=unit, unit_scale=True, desc=name)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the beginning; never 0."""
        return max(time.monotonic() - self._began, 1e-9)

    def add(self, count: int, note: str = "", *, may_log: bool = True) -> bool:
        """Count more work as done; `note` is shown with it. Gives whether a line was logged."""
        self._done += count
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
            return False
        now = time.monotonic()
        if not may_log or now - self._last_line_at < LINE_EVERY_S:
            return False
        self._last_line_at = now
        rate = (self._done - self._initial) / self.elapsed_s
        left = format_duration((self._total - self._done) / rate) if rate else "?"
        share = 100 * self._done / max(self._total, 1)
        shown = f"{rate / 1e6:.1f} M{self._unit}/s" if self._unit == "B" else f"{rate:.0f} {self._unit}/s"
        LOGGER.info("%s: %.0f%%, %s, %s left%s", self._name, share, shown, left, f"; {note}" if note else "")
        return True

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
