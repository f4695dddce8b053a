"""The files that one worker appends its encoded chunks to, until they are moved to their place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from pretrainkit.data.indexed.crc import crc32
from pretrainkit.data.indexed.results import ChunkResult

ROTATE_BYTES = 256 << 20
"""A new part begins after so many bytes of tokens, so that moved ones free their space."""


@dataclass(frozen=True)
class Place:
    """Where a key's ids and lengths of a chunk belong."""

    tokens: Path
    tokens_offset: int
    lengths: Path
    lengths_offset: int


class HeldChunk:
    """An encoded chunk in memory, until it is known where it belongs."""

    def __init__(self, result: ChunkResult) -> None:
        self.result = result
        self.clear()

    def clear(self) -> None:
        """Let go of the arrays."""
        self.ids: list[list[NDArray]] = [[] for _ in self.result.keys]
        self.lengths: list[list[NDArray[np.int32]]] = [[] for _ in self.result.keys]
        self.num_bytes = 0

    def add(self, k: int, ids: NDArray, lengths: NDArray[np.int32]) -> None:
        """Add a key's documents [ids, lengths]."""
        key = self.result.keys[k]
        self.ids[k].append(ids)
        self.lengths[k].append(lengths)
        self.num_bytes += ids.nbytes
        key.num_documents += len(lengths)
        key.num_tokens += len(ids)
        key.tokens_bytes += ids.nbytes
        key.tokens_crc32 = crc32(ids, key.tokens_crc32)
        key.lengths_crc32 = crc32(lengths, key.lengths_crc32)


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

    def append(self, held: HeldChunk) -> None:
        """Write what a chunk holds; the first time, the chunk's place in the part goes into its result."""
        result = held.result
        if not result.part:
            if any(file.tell() > ROTATE_BYTES for file in self._files):
                self.rotate()
            self._begin(result)
        for k in range(self._num_keys):
            for array in held.ids[k]:
                _write(self._files[2 * k], array.view(np.uint8).data)
            for array in held.lengths[k]:
                _write(self._files[2 * k + 1], array.view(np.uint8).data)
        held.clear()

    def _begin(self, result: ChunkResult) -> None:
        result.part = self.part
        for k, key in enumerate(result.keys):
            key.tokens_offset, key.lengths_offset = self._files[2 * k].tell(), self._files[2 * k + 1].tell()

    def append_rejects(self, held: HeldChunk, data: bytes) -> None:
        """Write a chunk's rejects, and what it holds before them."""
        self.append(held)
        if self._rejects is None:
            self._rejects = rejects_file(self._folder, self.part).open("wb", buffering=0)
        held.result.rejects_offset, held.result.rejects_bytes = self._rejects.tell(), len(data)
        _write(self._rejects, memoryview(data))


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


def write_at(path: Path, offset: int, arrays: list[NDArray]) -> None:
    """Write arrays one after the other into a file that exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for array in arrays:
            view = array.view(np.uint8).data
            while len(view):
                count = os.pwrite(descriptor, view, offset)
                offset, view = offset + count, view[count:]
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _write(file: BinaryIO, view: memoryview) -> None:
    try:
        while len(view):
            view = view[file.write(view) :]
    except OSError as error:
        raise OSError(error.errno, error.strerror, file.name) from error
