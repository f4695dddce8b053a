"""Compressed files read once, from the beginning, in blocks of whole lines; a cut or damaged one is an error."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import Any

import xxhash

from pretrainkit.data.readers.sources import Source
from pretrainkit.errors import DataError

BLOCK_BYTES = 4 << 20
"""Text per block, and bytes per hashed piece: about 50 ms of a worker's time, small beside a tokenizer's memory."""


class PieceHash:
    """XXH3-128 of a file's bytes by pieces of BLOCK_BYTES, so that pieces may be hashed anywhere."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self._open, self._room = xxhash.xxh3_128(), BLOCK_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""
        view = memoryview(data)
        while len(view):
            part = view[: self._room]
            self._open.update(part)
            self._room -= len(part)
            view = view[len(part) :]
            if not self._room:
                self._close()

    def _close(self) -> None:
        self.digests.append(self._open.hexdigest())
        self._open, self._room = xxhash.xxh3_128(), BLOCK_BYTES

    def finish(self) -> list[str]:
        """The digests of all pieces, in hex."""
        if self._room < BLOCK_BYTES:
            self._close()
        return self.digests


class _HashedFile(io.RawIOBase):
    """A file that hashes what is read from it."""

    def __init__(self, path: str, hashed: PieceHash) -> None:
        self._file, self._hash = io.FileIO(path), hashed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._hash.update(memoryview(buffer)[:count])
        return count

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


class _ZstdReader(io.RawIOBase):
    """All frames of a .zst, and an error at a cut one (zstandard's own reader takes that for the end)."""

    def __init__(self, file: Any) -> None:
        import zstandard

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


def open_stream(source: Source, hashed: PieceHash) -> tuple[Any, _HashedFile]:
    """The decompressed bytes of a file, and the file below whose position tells the progress."""
    raw = _HashedFile(source.path, hashed)
    buffered: Any = io.BufferedReader(raw, 1 << 18)
    if source.compression == "gz":
        try:
            from isal import igzip as gzip
        except ImportError:
            import gzip  # type: ignore[no-redef]
        return gzip.GzipFile(fileobj=buffered, mode="rb"), raw
    if source.compression == "xz":
        return lzma.LZMAFile(buffered), raw
    if source.compression == "bz2":
        return bz2.BZ2File(buffered), raw
    if source.compression == "zst":
        return io.BufferedReader(_ZstdReader(buffered), 1 << 18), raw
    return buffered, raw


def read_blocks(source: Source, hashed: PieceHash) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines of about BLOCK_BYTES, each with the bytes of the file read so far.

    A text file that is one document comes as one block. The blocks depend on the content alone.
    Raises DataError when the file is cut or damaged.
    """
    decompressed = 0
    try:
        stream, raw = open_stream(source, hashed)
        with raw, stream:
            rest: list[bytes] = []
            while data := _read_exactly(stream, BLOCK_BYTES):
                decompressed += len(data)
                cut = -1 if source.format == "txt-file" else data.rfind(b"\n")
                if cut < 0:
                    rest.append(data)
                    continue
                yield b"".join([*rest, data[: cut + 1]]), raw.tell()
                rest = [data[cut + 1 :]]
            while raw.read(1 << 18):
                pass  # what follows the compressed data still belongs to the file's hash
            if last := b"".join(rest):
                yield last, raw.tell()
    except (EOFError, zlib.error, lzma.LZMAError, OSError, ValueError) as error:
        raise _damaged(source, decompressed, error) from error
    except Exception as error:
        if type(error).__name__ not in ("ZstdError", "IsalError"):
            raise
        raise _damaged(source, decompressed, error) from error


def _damaged(source: Source, decompressed: int, error: Exception) -> DataError:
    return DataError(
        f"cut or damaged {source.compression}: {error}",
        where=source.path,
        needed=f"a whole file; {decompressed} bytes of text could be read from it",
        action="copy or download the file again; nothing was committed",
    )


def _read_exactly(stream: Any, num_bytes: int) -> bytes:
    parts, missing = [], num_bytes
    while missing and (part := stream.read(missing)):
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
