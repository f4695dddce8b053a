"""Compressed text files: read once, from the beginning, in blocks of records; a cut or damaged one is an error."""

from __future__ import annotations

import bz2
import contextlib
import io
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import xxhash
import zstandard
from isal import igzip
from isal.igzip_lib import IsalError

from pretrainkit.data.readers.records import Batch, RecordRules
from pretrainkit.data.readers.source import BLOCK_BYTES, Block, FileRange, RangeCounts, Source
from pretrainkit.data.readers.text import LineSource, TextFile
from pretrainkit.errors import DataError

SUFFIXES = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".xz": "xz", ".bz2": "bz2"}
DAMAGES: Any = EOFError, IsalError, lzma.LZMAError, zstandard.ZstdError, OSError, ValueError
COUNTED_BYTES = 1 << 16


@dataclass(frozen=True)
class Compressed(Source):
    """A compressed file; `text` is what it holds, under the same path."""

    text: LineSource | TextFile
    compression: str
    """`gz`, `zst`, `xz` or `bz2`."""
    is_stream: ClassVar[bool] = True

    def parse(self, *arguments: Any, **options: Any) -> Iterator[Batch]:
        return self.text.parse(*arguments, **options)

    def split(self, number: int, keys: tuple[str, ...]) -> Iterator[FileRange]:
        yield FileRange(number, 0, self.num_bytes, 0, 0, self.num_bytes)

    def read(self, part: FileRange, rules: RecordRules, counts: RangeCounts) -> NoReturn:
        raise AssertionError("a compressed file is read in blocks")

    def blocks(self, part: FileRange, rules: RecordRules, counts: RangeCounts) -> Iterator[Block]:
        """Blocks of about BLOCK_BYTES, cut by the content alone. Raises DataError for a cut or damaged file."""
        hashed = PieceHash()
        try:
            stream, raw = self._open(hashed)
            with raw, stream:
                position, rest = 0, [b""]
                while data := stream.read(BLOCK_BYTES):
                    end = data.rfind(b"\n") + 1 if isinstance(self.text, LineSource) else 0
                    if not end:
                        rest.append(data)
                        continue
                    text, rest, data = b"".join([*rest, data[:end]]), [data[end:]], b""
                    yield Block(text, None, raw.tell() - position)
                    position = raw.tell()
                while raw.readinto(bytearray(1 << 18)):
                    pass  # what follows the compressed data is part of the file's hash
                if last := b"".join(rest):
                    yield Block(last, None, raw.tell() - position)
        except DAMAGES as error:
            raise DataError(
                f"cut or damaged {self.compression}: {error}",
                where=self.path,
                needed=f"a complete file; {self._readable_bytes()} bytes of text can be read from it",
                action="copy or download the file again; nothing was committed",
            ) from error
        counts.digests = hashed.finish()

    def _open(self, hashed: PieceHash) -> tuple[Any, _HashedFile]:
        """The decompressed bytes, and the file below, whose position is the progress."""
        raw = _HashedFile(self.path, hashed)
        return opened(io.BufferedReader(raw, 1 << 18), self.compression), raw

    def _readable_bytes(self) -> int:
        """Bytes of text before the place where the file is damaged."""
        num_bytes = 0
        with contextlib.suppress(*DAMAGES), Path(self.path).open("rb") as file:
            stream = opened(file, self.compression)
            while data := stream.read(COUNTED_BYTES):
                num_bytes += len(data)
        return num_bytes


def opened(file: Any, compression: str) -> Any:
    """The decompressed bytes of an open file."""
    if compression == "zst":
        return io.BufferedReader(_ZstdReader(file), 1 << 18)
    if compression == "gz":
        return igzip.IGzipFile(fileobj=file, mode="rb")
    return (lzma.LZMAFile if compression == "xz" else bz2.BZ2File)(file)


class PieceHash:
    """XXH3-128 of a file's bytes by pieces of BLOCK_BYTES, so that pieces may be hashed anywhere."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._open, self._missing = xxhash.xxh3_128(), BLOCK_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        view = memoryview(data)
        while len(view):
            part = view[: self._missing]
            self._open.update(part)
            self._missing -= len(part)
            view = view[len(part) :]
            if not self._missing:
                self._close()

    def _close(self) -> None:
        self._digests.append(self._open.hexdigest())
        self._open, self._missing = xxhash.xxh3_128(), BLOCK_BYTES

    def finish(self) -> list[str]:
        """The digests of all pieces, in hex."""
        if self._missing < BLOCK_BYTES:
            self._close()
        return self._digests


class _HashedFile(io.FileIO):
    """A file that hashes what is read from it."""

    def __init__(self, path: str, hashed: PieceHash) -> None:
        super().__init__(path)
        self._hashed = hashed

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self._hashed.update(memoryview(buffer)[:count])
        return count


class _ZstdReader(io.RawIOBase):
    """All frames of a .zst, and an error at a cut one (zstandard's own reader takes that for the end)."""

    def __init__(self, file: Any) -> None:
        self._file, self._decompressor = file, zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._file.read(1 << 18)
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("Compressed file ended before the end of its last frame")
                    return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._output = memoryview(self._frame.decompress(self._input))
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        memoryview(buffer)[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
