"""The files that one worker appends its encoded chunks to, until they are moved to their place."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pretrainkit.data.crc import crc32
from pretrainkit.data.results import KeyResult

ROTATE_BYTES = 256 << 20
"""A new part begins after so many bytes of tokens, so that moved ones free their space."""


class PartWriter:
    """Appends tokens, lengths and rejects to `<folder>/<name>-<generation>.*`."""

    def __init__(self, folder: Path, name: str, num_keys: int) -> None:
        self._folder, self._name, self._num_keys = folder, name, num_keys
        self._generation = -1
        self._files: list[BinaryIO] = []
        self._rejects: BinaryIO | None = None
        self.rotate()

    @property
    def part(self) -> str:
        """Name of the part that is written now."""
        return f"{self._name}-{self._generation}"

    @property
    def is_full(self) -> bool:
        """Whether the next chunk should begin a new part."""
        return any(file.tell() > ROTATE_BYTES for file in self._files)

    def rotate(self) -> None:
        """Begin a new part."""
        self.close()
        self._generation += 1
        paths = [part_file(self._folder, self.part, k, kind) for k in range(self._num_keys) for kind in KINDS]
        self._files = [path.open("wb", buffering=0) for path in paths]
        self._rejects = None

    def close(self) -> None:
        """Close the files of the part."""
        for file in [*self._files, *([self._rejects] if self._rejects else [])]:
            file.close()

    def begin_chunk(self) -> list[KeyResult]:
        """Empty results that know where their bytes will lie."""
        places = [file.tell() for file in self._files]
        return [KeyResult(tokens_offset=places[2 * k], lengths_offset=places[2 * k + 1]) for k in range(self._num_keys)]

    def append(self, key: int, result: KeyResult, ids: NDArray, lengths: NDArray) -> None:
        """Write documents [ids, lengths] and add them to the key's result."""
        _write(self._files[2 * key], ids.view(np.uint8).data)
        _write(self._files[2 * key + 1], lengths.view(np.uint8).data)
        result.num_documents += len(lengths)
        result.num_tokens += len(ids)
        result.tokens_bytes += ids.nbytes
        result.tokens_crc32 = crc32(ids, result.tokens_crc32)
        result.lengths_crc32 = crc32(lengths, result.lengths_crc32)

    def append_rejects(self, data: bytes) -> int:
        """Write a chunk's rejects; gives their offset."""
        if self._rejects is None:
            self._rejects = rejects_file(self._folder, self.part).open("wb", buffering=0)
        offset = self._rejects.tell()
        _write(self._rejects, memoryview(data))
        return offset


KINDS = ("tokens", "lengths")


def part_file(folder: Path, part: str, key: int, kind: str) -> Path:
    """Where a part keeps a key's `tokens` or `lengths`."""
    return folder / f"{part}.{key}.{kind}"


def rejects_file(folder: Path, part: str) -> Path:
    """Where a part keeps rejects."""
    return folder / f"{part}.rejects"


def remove_part(folder: Path, part: str) -> None:
    """Remove all files of a part."""
    for path in folder.glob(f"{part}.*"):
        path.unlink()


def _write(file: BinaryIO, view: memoryview) -> None:
    while len(view):
        view = view[file.write(view) :]
