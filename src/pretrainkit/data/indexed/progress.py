"""How far a preprocessing run is: text, tokens and documents of what was encoded in this process."""

from __future__ import annotations

from pretrainkit.data.byte_progress import ByteProgress
from pretrainkit.data.indexed.encoded_chunk import EncodedChunk
from pretrainkit.data.indexed.request import Plan
from pretrainkit.data.readers.work_items import WorkItem
from pretrainkit.units import format_count


class Progress:
    """A bar on a terminal, or a line in the log, at the earliest after so many documents as the request says."""

    def __init__(self, plan: Plan, remaining: dict[int, WorkItem]) -> None:
        total = sum(item.num_bytes for item in plan.items.values())
        initial = total - sum(item.num_bytes for item in remaining.values())
        self._bytes = ByteProgress(total, "preprocess", initial=initial)
        self._text_bytes = self._num_tokens = self._num_documents = 0
        self._interval = self._next_line = plan.request.log_interval

    def add(self, chunk: EncodedChunk) -> None:
        """A chunk is encoded."""
        self._text_bytes += sum(counts.num_bytes for counts in chunk.ranges)
        self._num_tokens += sum(key.num_tokens for key in chunk.keys)
        self._num_documents += max(key.num_documents for key in chunk.keys)
        elapsed_s = self._bytes.elapsed_s
        note = (
            f"{self._num_documents} documents, {self._text_bytes / elapsed_s / 1e6:.1f} MB/s of text,"
            f" {format_count(self._num_tokens / elapsed_s)}tokens/s"
        )
        if self._bytes.add(chunk.disk_bytes, note, may_log=self._num_documents >= self._next_line):
            self._next_line = self._num_documents + self._interval

    def close(self) -> None:
        """Take the bar away."""
        self._bytes.close()
