"""What a worker reports of a chunk it has encoded (counts, checksums, where its part files hold the rest), or why not.

A part is a set of files that one worker appends to: `<part>.<k>.tokens` and `<part>.<k>.lengths` for each key
k, and `<part>.rejects`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from pretrainkit.errors import PretrainkitError


@dataclass
class KeyResult:
    """One key's documents of a chunk."""

    num_documents: int = 0
    num_empty: int = 0
    num_tokens: int = 0
    tokens_offset: int = 0
    """Byte offset in the part's tokens."""
    tokens_bytes: int = 0
    tokens_crc32: int = 0
    lengths_offset: int = 0
    lengths_crc32: int = 0

    @property
    def lengths_bytes(self) -> int:
        """Bytes of the documents' lengths, an int32 each."""
        return 4 * self.num_documents


@dataclass
class SpanResult:
    """What was read of one file."""

    source: int
    num_lines: int = 0
    num_records: int = 0
    num_blank: int = 0
    num_rejected: int = 0
    num_replaced: int = 0
    num_bytes: int = 0
    """Decompressed."""
    num_tokens: list[int] = field(default_factory=list)
    """Per key."""
    digests: list[str] = field(default_factory=list)
    """Of its pieces, in hex; a stream's come with its end instead."""


@dataclass
class ChunkResult:
    """A unit, or a block of a stream, encoded and lying in a part."""

    unit: int
    block: int
    part: str
    """Empty while the worker holds it in memory, and once it was written straight to its place."""
    disk_bytes: int
    """Progress on disk."""
    spans: list[SpanResult]
    keys: list[KeyResult]
    rejects_offset: int = 0
    rejects_bytes: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Place in the output."""
        return self.unit, self.block

    def to_json(self) -> dict[str, Any]:
        """For the journal."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ChunkResult:
        """From the journal."""
        spans = [SpanResult(**span) for span in value.pop("spans")]
        keys = [KeyResult(**key) for key in value.pop("keys")]
        return cls(**value, spans=spans, keys=keys)


@dataclass
class BadRecord:
    """A record that stops the run."""

    unit: int
    block: int
    source: int
    line: int
    """Counted from 0 within the chunk's part of the file."""
    found: str


@dataclass(frozen=True)
class Difference:
    """fastokens gave other ids than tokenizers, or doesn't load the tokenizer."""

    found: str


@dataclass(frozen=True)
class Failure:
    """An error of the machine or the input, to be raised again by the parent."""

    found: str
    where: str = ""
    needed: str = ""
    action: str = ""

    @classmethod
    def of(cls, error: PretrainkitError | OSError | MemoryError) -> Failure:
        """An error as it is told to the parent."""
        if isinstance(error, PretrainkitError):
            return cls(error.found, error.where, error.needed, error.action)
        if isinstance(error, OSError):
            return cls(f"{error.strerror or error}", str(error.filename or ""))
        return cls("out of memory", action="use fewer --workers, or set --max-doc-bytes")
