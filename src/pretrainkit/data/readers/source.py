"""An input file, whatever its format: what `split`, `read`, `blocks` and `parse` promise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import xxhash

from pretrainkit.data.readers.records import Batch, RecordRules
from pretrainkit.errors import DataError

BLOCK_BYTES = 4 << 20
"""Text in a piece of work, and bytes in a hashed piece: about 50 ms of a worker's time, little memory compared with a
tokenizer's."""


@dataclass(frozen=True)
class FileRange:
    """A part of one file: bytes of a text file, row groups of a Parquet file, record batches of an Arrow file."""

    source: int
    """Position in the list of sources."""
    begin: int
    end: int
    first_piece: int
    end_piece: int
    """Pieces of BLOCK_BYTES of the file that are hashed when this range is read."""
    num_bytes: int
    """The range's share of the file on disk."""


@dataclass
class RangeCounts:
    """What was read of a range. The reader sets `num_bytes` and `digests`; who encodes the records counts the rest."""

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
    num_text_bytes: list[int] = field(default_factory=list)
    """Per key: bytes in UTF-8 of the texts that became documents."""
    num_spelled: list[int] = field(default_factory=list)
    """Per key: records whose text spells a special token."""
    labels: list[dict[str, list[int]]] = field(default_factory=list)
    """Per key: documents, tokens and text bytes of each label; empty when none is asked for."""
    num_contaminated: int = 0
    """Records left out, as they overlap with an evaluation set."""
    overlaps: dict[str, int] = field(default_factory=dict)
    """Records that overlap with each set, left out or not."""
    digests: list[str] = field(default_factory=list)
    """XXH3-128 of the range's pieces of BLOCK_BYTES, in hex; those of a stream come with its last block."""


@dataclass(frozen=True)
class Block:
    """Records for another process to parse or encode: whole lines, or rows that are parsed already."""

    data: bytes
    batch: Batch | None
    disk_bytes: int
    """Progress in the file."""

    @property
    def num_lines(self) -> int:
        """Lines, or rows."""
        if self.batch is not None:
            return self.batch.num_lines
        return self.data.count(b"\n") + (self.data[-1:] not in (b"\n", b""))


@dataclass(frozen=True)
class Source(ABC):
    """One input file."""

    path: str
    num_bytes: int
    """On disk."""
    modified_ns: int
    relative: str
    """Path below the folder that was named as input, or the file's name."""
    is_stream: ClassVar[bool] = False
    """Whether the file can only be read from its beginning."""

    @abstractmethod
    def split(self, number: int, keys: tuple[str, ...]) -> Iterator[FileRange]:
        """Ranges of about BLOCK_BYTES that hold every record once, in order; `number` becomes their `source`.

        Depends on the file alone. Raises RequestError for a table without a wanted column.
        """

    @abstractmethod
    def read(self, part: FileRange, rules: RecordRules, counts: RangeCounts) -> Iterator[Batch]:
        """The records of a range in small batches; sets `num_bytes` and `digests` once all are taken. Not for streams.

        Raises DataError for a damaged file.
        """

    @abstractmethod
    def blocks(self, part: FileRange, rules: RecordRules, counts: RangeCounts) -> Iterator[Block]:
        """The range in blocks, for a process that counts lines while others `parse`; sets `digests` at the end."""

    def parse(
        self, data: bytes, at_start: bool, rules: RecordRules, batch_bytes: int = 0, first: int = 0
    ) -> Iterator[Batch]:
        """The records in complete lines of a text file, in batches of about `batch_bytes`; 0: in one.

        `at_start`: the data begins where the file does. `first` is the number of the first line.
        """
        raise AssertionError(f"{self.path} is not a text file")

    def lines_before(self, begin: int) -> int:
        """Lines, or rows, of the file before the first one of a range that begins at `begin`."""
        return 0

    def check_unchanged(self) -> None:
        """Raises DataError when the file isn't the one that the work began with: what was read may be of both."""
        try:
            status = Path(self.path).stat()
            what = "changed" if (status.st_size, status.st_mtime_ns) != (self.num_bytes, self.modified_ns) else ""
        except FileNotFoundError:
            what = "was removed"
        if what:
            raise DataError(
                f"the file {what} while it was read; nothing of it was committed",
                where=self.path,
                action="run the command again once nothing writes to its input",
            )

    def digests(self, part: FileRange) -> list[str]:
        """XXH3-128 of the range's pieces of the file, in hex."""
        found = []
        with Path(self.path).open("rb", buffering=0) as file:
            file.seek(part.first_piece * BLOCK_BYTES)
            for _ in range(part.first_piece, part.end_piece):
                found.append(xxhash.xxh3_128_hexdigest(file.read(BLOCK_BYTES)))
        return found
