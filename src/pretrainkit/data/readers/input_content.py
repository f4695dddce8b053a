"""What input files hold, told cheaply: by their place on the disk while that is unchanged, else by their hashes.

A hash is XXH3-128 over the XXH3-128 digests of pieces of 4 MiB, as the data engine takes it while it reads a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pretrainkit.data.readers.streams import BLOCK_BYTES
from pretrainkit.errors import DataError


@dataclass(frozen=True)
class InputState:
    """One input file as it was read: whoever finds the same number of bytes, time and inode need not read it again."""

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


def look_at(name: str, path: str) -> InputState:
    """A file's place, without reading it."""
    found = Path(path).stat()
    return InputState(name, found.st_size, found.st_mtime_ns, found.st_ino)


def same_places(now: Sequence[InputState], then: Sequence[InputState]) -> bool:
    """Whether files that were read once are untouched."""
    return [state.place for state in now] == [state.place for state in then]


def hash_file(path: str) -> str:
    """The hash of a file's bytes, at the speed of the disk."""
    digest = xxhash.xxh3_128()
    try:
        with Path(path).open("rb", buffering=0) as file:
            while piece := _read_exactly(file, BLOCK_BYTES):
                digest.update(xxhash.xxh3_128_digest(piece))
    except OSError as error:
        raise DataError(error.strerror or str(error), where=path) from error
    return digest.hexdigest()


def _read_exactly(file: object, num_bytes: int) -> bytes:
    piece: bytes = file.read(num_bytes)  # type: ignore[attr-defined]
    while piece and len(piece) < num_bytes and (more := file.read(num_bytes - len(piece))):  # type: ignore[attr-defined]
        piece += more
    return piece
