"""A piece of the input, encoded: counts and checksums of its data, and the part files that hold it for a while.

The data are columns: tokens, lengths (int32) and, if asked for, labels (`labels`) of each key in turn. A chunk's place
in the output is known once all earlier ones are encoded. A chunk that waits long is in part files, a file for each
column; so are its rejects, always.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32, crc32_combine

from pretrainkit.data.indexed.file_bytes import checksum
from pretrainkit.data.readers.records import Reject
from pretrainkit.data.readers.source import RangeCounts

Order = tuple[int, int]
"""Place in the output: number of the work item, and number of the block in a stream (0 for other items)."""
Target = tuple[Path, int]
"""Where a column belongs: a file, and an offset in it."""


@dataclass
class Column:
    """Size and CRC-32 of some bytes."""

    num_bytes: int = 0
    crc32: int = 0

    def add(self, data: Any) -> None:
        """Add a contiguous array, or bytes."""
        self.crc32 = crc32(data, self.crc32)
        self.num_bytes += memoryview(data).nbytes

    def append(self, other: Column) -> None:
        """Add bytes that were summed apart."""
        self.crc32 = crc32_combine(self.crc32, other.crc32, other.num_bytes)
        self.num_bytes += other.num_bytes

    def is_at(self, path: Path, offset: int) -> bool:
        """Whether a file holds these bytes there."""
        return checksum(path, offset, self.num_bytes) == self.crc32


@dataclass
class Chunk:
    """A work item, or a block of a stream, encoded."""

    item: int
    block: int
    is_last: bool
    """Whether no block of this item follows."""
    disk_bytes: int
    """Progress in the input."""
    columns: list[Column]
    num_empty: list[int]
    """Documents without a token, per key."""
    rejects: Column = field(default_factory=Column)
    ranges: list[RangeCounts] = field(default_factory=list)
    worker: int | None = None
    """The worker that holds it in memory; None when it is in part files."""
    bad: tuple[int, Reject] | None = None
    """The record that stops the run, and the number of its range."""

    @property
    def order(self) -> Order:
        """Place in the output."""
        return self.item, self.block

    def parts(self, folder: Path) -> list[Target]:
        """Where part files hold its columns."""
        return [(folder / f"{self.item}-{self.block}.{c}.part", 0) for c in range(len(self.columns))]

    def rejects_path(self, folder: Path) -> Path:
        """The part file of its rejects; there is none without rejects."""
        return folder / f"{self.item}-{self.block}.rejects.part"

    def part_files(self, folder: Path) -> list[Path]:
        """All part files that it has now."""
        columns = [] if self.worker is not None else [path for path, _ in self.parts(folder)]
        return [*columns, self.rejects_path(folder)] if self.rejects.num_bytes else columns

    def is_in_parts(self, folder: Path) -> bool:
        """Whether its part files are undamaged."""
        return self.is_at(self.parts(folder)) and self.rejects.is_at(self.rejects_path(folder), 0)

    def is_at(self, targets: list[Target]) -> bool:
        """Whether files hold its undamaged columns."""
        return all(column.is_at(*target) for column, target in zip(self.columns, targets, strict=True))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Chunk:
        """From the journal."""
        ranges = [RangeCounts(**entry) for entry in value.pop("ranges")]
        columns, rejects = [Column(**entry) for entry in value.pop("columns")], Column(**value.pop("rejects"))
        return cls(**value, ranges=ranges, columns=columns, rejects=rejects)
