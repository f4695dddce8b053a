"""How far work over a known number of bytes or items is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

from pretrainkit.logs import get_logger
from pretrainkit.units import format_duration

LOGGER = get_logger(__name__)
LINE_EVERY_S = 10.0


class ByteProgress:
    """Counts up to `total`."""

    def __init__(self, total: int, name: str, unit: str = "B") -> None:
        self._total, self._name, self._unit = total, name, unit
        self._done = 0
        self._began = self._last_line_at = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread: workers may still be forked
            self._bar = tqdm(total=total, unit=unit, unit_scale=True, desc=name)

    def add(self, count: int) -> None:
        """More is done."""
        self._done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(count)
        elif now - self._last_line_at >= LINE_EVERY_S:
            self._last_line_at = now
            rate = self._done / (now - self._began)
            left = format_duration((self._total - self._done) / rate) if rate else "?"
            share = 100 * self._done / max(self._total, 1)
            shown = f"{rate / 1e6:.1f} M{self._unit}/s" if self._unit == "B" else f"{rate:.0f} {self._unit}/s"
            LOGGER.info("%s: %.0f%%, %s, %s left", self._name, share, shown, left)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
