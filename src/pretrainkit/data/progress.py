"""How far a preprocessing run is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

from pretrainkit.data.request import Plan
from pretrainkit.data.results import ChunkResult
from pretrainkit.logs import get_logger
from pretrainkit.units import format_count, format_duration

LOGGER = get_logger(__name__)
LINE_EVERY_S = 10.0
"""Least time between two lines in a log."""


class Progress:
    """Counts what was encoded in this process."""

    def __init__(self, plan: Plan, done: set[tuple[int, int]]) -> None:
        self._total = sum(span.num_bytes for unit in plan.units.values() for span in unit.spans)
        finished = [plan.units[number] for number, _ in done if not plan.units[number].is_stream]
        self._start_bytes = sum(span.num_bytes for unit in finished for span in unit.spans)
        self._disk_bytes = self._text_bytes = self._num_tokens = self._num_documents = 0
        self._interval, self._next_line = plan.request.log_interval, plan.request.log_interval
        self._began = self._last_line_at = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # no thread: a later start of workers may fork
            self._bar = tqdm(total=self._total, initial=self._start_bytes, unit="B", unit_scale=True, desc="preprocess")

    def add(self, result: ChunkResult) -> None:
        """A chunk is encoded."""
        self._disk_bytes += result.disk_bytes
        self._text_bytes += sum(span.num_bytes for span in result.spans)
        self._num_tokens += sum(key.num_tokens for key in result.keys)
        self._num_documents += max(key.num_documents for key in result.keys)
        if self._bar is not None:
            self._bar.update(result.disk_bytes)

    def show(self) -> None:
        """Say where we are, if it is time."""
        now = time.monotonic()
        elapsed = max(now - self._began, 1e-9)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{format_count(self._num_tokens / elapsed)}tokens/s", refresh=False)
            return
        if self._num_documents < self._next_line or now - self._last_line_at < LINE_EVERY_S:
            return
        self._next_line, self._last_line_at = self._num_documents + self._interval, now
        left = self._total - self._start_bytes - self._disk_bytes
        remaining_s = elapsed * left / max(self._disk_bytes, 1)
        LOGGER.info(
            "%d documents, %.0f%%, %.1f MB/s, %stokens/s, %s left",
            self._num_documents,
            100 * (self._start_bytes + self._disk_bytes) / max(self._total, 1),
            self._text_bytes / elapsed / 1e6,
            format_count(self._num_tokens / elapsed),
            format_duration(remaining_s),
        )

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
