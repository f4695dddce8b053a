"""Whether input files still have the same content: size, time and inode decide while they are equal, else hashes.

A hash is XXH3-128 over the XXH3-128 digests of pieces of 4 MiB, as the data engine takes it while it reads a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pretrainkit.data.readers.source import BLOCK_BYTES
from pretrainkit.errors import DataError


@dataclass(frozen=True)
class InputState:
    """One input file as it was read: while its size, time and inode are the same, it need not be read again."""

    name: str
    """Path below the folder that was named as input, or the file's name."""
    num_bytes: int
    modified_ns: int
    inode: int
    xxh3_128: str = ""
    """Empty: not read yet."""

    @property
    def place(self) -> tuple[str, int, int, int]:
        """All but the hash."""
        return self.name, self.num_bytes, self.modified_ns, self.inode

    @property
    def content(self) -> tuple[str, int, str]:
        """What makes two inputs equal, whenever and wherever they were written."""
        return self.name, self.num_bytes, self.xxh3_128


def stat_input(name: str, path: str) -> InputState:
    """A file's state, without reading it."""
    found = Path(path).stat()
    return InputState(name, found.st_size, found.st_mtime_ns, found.st_ino)


def unchanged_since(now: Sequence[InputState], then: Sequence[InputState]) -> bool:
    """Whether files that were read once are untouched."""
    return [state.place for state in now] == [state.place for state in then]


def hash_file(path: str) -> str:
    """The hash of a file's bytes, at the speed of the disk."""
    digest = xxhash.xxh3_128()
    try:
        with Path(path).open("rb") as file:
            while piece := file.read(BLOCK_BYTES):
                digest.update(xxhash.xxh3_128_digest(piece))
    except OSError as error:
        raise DataError(error.strerror or str(error), where=path) from error
    return digest.hexdigest()
