"""How far a preprocessing run is: text, tokens and documents of what was encoded in this process."""

from __future__ import annotations

from pretrainkit.data.byte_progress import ByteProgress
from pretrainkit.data.indexed.request import Plan
from pretrainkit.data.indexed.results import ChunkResult
from pretrainkit.units import format_count


class Progress:
    """A bar on a terminal, or a line in the log, at the earliest after so many documents as the request says."""

    def __init__(self, plan: Plan, done: set[tuple[int, int]]) -> None:
        total = sum(span.num_bytes for unit in plan.units.values() for span in unit.spans)
        finished = [plan.units[number] for number, _ in done if not plan.units[number].is_stream]
        initial = sum(span.num_bytes for unit in finished for span in unit.spans)
        self._bytes = ByteProgress(total, "preprocess", initial=initial)
        self._text_bytes = self._num_tokens = self._num_documents = 0
        self._interval, self._next_line = plan.request.log_interval, plan.request.log_interval

    def add(self, result: ChunkResult) -> None:
        """A chunk is encoded."""
        self._text_bytes += sum(span.num_bytes for span in result.spans)
        self._num_tokens += sum(key.num_tokens for key in result.keys)
        self._num_documents += max(key.num_documents for key in result.keys)
        elapsed_s = self._bytes.elapsed_s
        note = (
            f"{self._num_documents} documents, {self._text_bytes / elapsed_s / 1e6:.1f} MB/s of text,"
            f" {format_count(self._num_tokens / elapsed_s)}tokens/s"
        )
        if self._bytes.add(result.disk_bytes, note, may_log=self._num_documents >= self._next_line):
            self._next_line = self._num_documents + self._interval

    def close(self) -> None:
        """Take the bar away."""
        self._bytes.close()
