"""Checksums in the commit mark of a training checkpoint, by which bytes that changed since the save are found.

The mark has, by file, the CRC-32 of each of its parts by the offset where that begins; a part reaches to the next one,
or to the end of the file. A part of a `.distcp` file is one chunk, as `.metadata` lists them, so that a reader of some
tensors checks those alone; other files are one part. Marks of older versions have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.data.indexed.file_bytes import checksum
from pretrainkit.machine import count_cpus

COMMIT_MARK = "complete.json"
"""In a training checkpoint: written last, it lists every file with its size and its checksums."""
FIELD = "checksums"

Checksums = Mapping[str, Mapping[int, int]]
"""Per file, relative to the checkpoint: offset of a part -> CRC-32."""


@dataclass(frozen=True)
class Part:
    """Bytes of a file, and what they were when they were saved."""

    path: Path
    begin: int
    num_bytes: int
    crc32: int

    def problem(self) -> str:
        """How the bytes differ from those that were saved; empty if they don't.

        Raises OSError when they can't be read.
        """
        if checksum(self.path, self.begin, self.num_bytes) == self.crc32:
            return ""
        where = f"bytes {self.begin} to {self.begin + self.num_bytes}"
        return f"{self.path.parent.name}/{self.path.name}: {where} are not those that were saved (CRC-32)"


def as_json(checksums: Checksums) -> dict[str, dict[str, int]]:
    """The mark's field, in the order of names and offsets."""
    return {name: {str(at): crc32 for at, crc32 in sorted(parts.items())} for name, parts in sorted(checksums.items())}


def of_mark(mark: Mapping[str, Any]) -> dict[str, dict[int, int]]:
    """The checksums in the content of a commit mark; empty in marks of older versions. Raises ValueError and the like
    where the field is damaged.
    """
    return {
        name: {int(at): int(crc32) for at, crc32 in parts.items()} for name, parts in (mark.get(FIELD) or {}).items()
    }


def of_file(path: Path) -> dict[int, int]:
    """The checksum of a file as one part, read from disk."""
    return {0: checksum(path, 0, path.stat().st_size)}


def parts_of(folder: Path) -> list[Part]:
    """All parts of a checkpoint that have a checksum, the largest first; none without a commit mark that has some."""
    mark = files.read_object(folder / COMMIT_MARK)
    sizes = mark.get("file_sizes", {})
    parts = [
        Part(folder / name, begin, end - begin, sums[begin])
        for name, sums in of_mark(mark).items()
        for begin, end in _bounds(sums, sizes[name])
    ]
    return sorted(parts, key=lambda part: (-part.num_bytes, part.path, part.begin))


def first_problem(parts: Iterable[Part], *, threads: int | None = None) -> str:
    """The problem of the first of these parts that has one, in their order; empty if none has."""
    with ThreadPoolExecutor(threads or count_cpus()) as pool:
        try:
            return next(filter(None, pool.map(Part.problem, parts)), "")
        finally:
            pool.shutdown(cancel_futures=True)


def _bounds(sums: Mapping[int, int], size: int) -> Iterator[tuple[int, int]]:
    begins = sorted(sums)
    return zip(begins, [*begins[1:], size], strict=True)
