"""What a worker reports of a piece of work that it has encoded: counts and checksums, without the tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pretrainkit.data.readers.records import Reject
from pretrainkit.data.readers.source import RangeCounts

Order = tuple[int, int]
"""Place in the output: number of the work item, and number of the block in a stream (0 for other items)."""


@dataclass
class KeyCounts:
    """One key's documents."""

    num_documents: int = 0
    num_empty: int = 0
    num_tokens: int = 0
    tokens_bytes: int = 0
    tokens_crc32: int = 0
    lengths_crc32: int = 0

    @property
    def lengths_bytes(self) -> int:
        """Bytes of the documents' lengths, an int32 each."""
        return 4 * self.num_documents


@dataclass
class EncodedChunk:
    """A work item, or a block of a stream, encoded."""

    item: int
    block: int
    is_last: bool
    """Whether no block of this item follows."""
    disk_bytes: int
    """Progress in the input."""
    ranges: list[RangeCounts]
    keys: list[KeyCounts]
    has_rejects: bool = False
    worker: int | None = None
    """The worker that holds it in memory; None once it is in a part file or in the output."""
    bad: tuple[int, Reject] | None = None
    """The record that stops the run, and the number of its range."""

    @property
    def order(self) -> Order:
        """Place in the output."""
        return self.item, self.block

    def to_json(self) -> dict[str, Any]:
        """For a file."""
        value = asdict(self)
        del value["worker"], value["bad"]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> EncodedChunk:
        """From a file."""
        ranges = [RangeCounts(**entry) for entry in value.pop("ranges")]
        keys = [KeyCounts(**entry) for entry in value.pop("keys")]
        return cls(**value, ranges=ranges, keys=keys)


@dataclass(frozen=True)
class OutputOffset:
    """Where one key's tokens and lengths of a chunk belong, in bytes of the .bin and the .idx."""

    tokens: int
    lengths: int
