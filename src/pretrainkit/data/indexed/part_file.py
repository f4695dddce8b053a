"""A part file, `<item>-<block>.part`: an encoded chunk on disk until its place in the output is known.

    data      tokens and lengths of each key, and rejects, as segments in any order
    trailer   JSON: the chunk, and [offset, bytes] of all segments of each column
    8 bytes   length of the trailer, little endian

Columns are numbered: 2 k for the tokens of key k, 2 k + 1 for its lengths, -1 for rejects. A part file is complete once
it has its name; what a power cut takes from it is found by the chunk's checksums.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from pretrainkit.data.indexed.encoded_chunk import EncodedChunk, Order
from pretrainkit.data.indexed.file_bytes import checksum, copy_range, opened, write_at

REJECTS = -1


def part_path(folder: Path, order: Order) -> Path:
    """Where a chunk's part file is."""
    return folder / f"{order[0]}-{order[1]}.part"


class PartWriter:
    """Writes a part file; `finish` gives it its name."""

    def __init__(self, folder: Path, order: Order, num_keys: int) -> None:
        self._final = part_path(folder, order)
        self._path = self._final.with_suffix(".tmp")
        self._path.write_bytes(b"")
        self._segments: list[list[tuple[int, int]]] = [[] for _ in range(2 * num_keys + 1)]
        self._num_bytes = 0

    def append(self, column: int, arrays: Iterable[Any]) -> None:
        """Add contiguous arrays, or bytes, to a column."""
        begin = self._num_bytes
        with opened(self._path, os.O_WRONLY) as descriptor:
            for array in arrays:
                self._num_bytes = write_at(descriptor, self._num_bytes, array)
        self._segments[column].append((begin, self._num_bytes - begin))

    def finish(self, chunk: EncodedChunk) -> None:
        """Complete the file."""
        trailer = orjson.dumps({"chunk": chunk.to_json(), "segments": self._segments})
        with opened(self._path, os.O_WRONLY) as descriptor:
            write_at(descriptor, self._num_bytes, trailer + len(trailer).to_bytes(8, "little"))
        self._path.rename(self._final)


class PartFile:
    """A complete part file."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError when it is damaged."""
        self._path = path
        with opened(path, os.O_RDONLY) as descriptor:
            size = os.fstat(descriptor).st_size
            trailer_bytes = int.from_bytes(os.pread(descriptor, 8, max(0, size - 8)), "little")
            trailer = os.pread(descriptor, min(size, trailer_bytes), max(0, size - 8 - trailer_bytes))
        try:
            value = orjson.loads(trailer)
            self.chunk, self._segments = EncodedChunk.from_json(value["chunk"]), value["segments"]
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a trailer: {error}") from error

    def read(self, column: int) -> bytes:
        """All of a column."""
        with opened(self._path, os.O_RDONLY) as descriptor:
            return b"".join(os.pread(descriptor, size, begin) for begin, size in self._segments[column])

    def copy(self, column: int, target: Path, offset: int) -> None:
        """Copy a column into another file."""
        with opened(self._path, os.O_RDONLY) as source, opened(target, os.O_WRONLY) as descriptor:
            for begin, num_bytes in self._segments[column]:
                copy_range(source, begin, descriptor, offset, num_bytes)
                offset += num_bytes

    def is_undamaged(self) -> bool:
        """Whether the tokens and lengths are those that were written."""
        found = []
        for column in self._segments[:REJECTS]:
            found.append(0)
            for begin, num_bytes in column:
                found[-1] = checksum(self._path, begin, num_bytes, found[-1])
        return found == [crc for key in self.chunk.keys for crc in (key.tokens_crc32, key.lengths_crc32)]
