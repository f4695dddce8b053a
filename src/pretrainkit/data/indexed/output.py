"""One output while it is put together: chunks are copied to their place in order, then files get their names."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from pretrainkit.data.indexed.crc import combine, crc32
from pretrainkit.data.indexed.format import HEADER, bin_path, idx_path, write_header, write_index_tail
from pretrainkit.data.indexed.manifest import manifest_path
from pretrainkit.data.indexed.parts import Place, part_file, rejects_file
from pretrainkit.data.indexed.results import ChunkResult, SpanResult
from pretrainkit.files import fsync_path

COPY_BYTES = 64 << 20
READ_BYTES = 8 << 20


@dataclass
class SourceTotals:
    """What was read of one input file so far, in order."""

    num_lines: int = 0
    num_records: int = 0
    num_blank: int = 0
    num_rejected: int = 0
    num_replaced: int = 0
    num_bytes: int = 0
    num_tokens: list[int] = field(default_factory=list)
    """Per key."""
    num_pieces: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)

    def add(self, span: SpanResult) -> None:
        """Add the next part of the file."""
        for name in ("num_lines", "num_records", "num_blank", "num_rejected", "num_replaced", "num_bytes"):
            setattr(self, name, getattr(self, name) + getattr(span, name))
        earlier = self.num_tokens or [0] * len(span.num_tokens)
        self.num_tokens = [a + b for a, b in zip(earlier, span.num_tokens, strict=True)]
        self.add_digests(span.digests)

    def add_digests(self, digests: list[str]) -> None:
        """Add the hashes of the next pieces."""
        for digest in digests:
            self.digest.update(bytes.fromhex(digest))
        self.num_pieces += len(digests)


@dataclass
class KeyTotals:
    """One key's documents so far."""

    num_documents: int = 0
    num_empty: int = 0
    num_tokens: int = 0
    tokens_bytes: int = 0
    crc32: int = 0


def copy_from_part(folder: Path, result: ChunkResult, places: list[Place]) -> None:
    """Copy a chunk from its part to its place, inside the kernel where it can."""
    for k, (key, place) in enumerate(zip(result.keys, places, strict=True)):
        tokens, lengths = (part_file(folder, result.part, k, kind) for kind in ("tokens", "lengths"))
        _copy(tokens, key.tokens_offset, place.tokens, place.tokens_offset, key.tokens_bytes)
        _copy(lengths, key.lengths_offset, place.lengths, place.lengths_offset, key.lengths_bytes)


def _copy(source: Path, source_offset: int, target: Path, target_offset: int, num_bytes: int) -> None:
    with source.open("rb", buffering=0) as reading, target.open("r+b", buffering=0) as writing:
        copy_range(reading.fileno(), source_offset, writing.fileno(), target_offset, num_bytes)


def copy_range(source: int, source_offset: int, target: int, target_offset: int, num_bytes: int) -> None:
    """Copy bytes between open files with copy_file_range, or by reading where the system has none for them."""
    in_kernel = hasattr(os, "copy_file_range")
    while num_bytes:
        count = 0
        if in_kernel:
            try:
                size = min(num_bytes, COPY_BYTES)
                count = os.copy_file_range(source, target, size, source_offset, target_offset)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                    raise
            in_kernel = count > 0
        if not count:
            data = os.pread(source, min(num_bytes, READ_BYTES), source_offset)
            if not data:
                raise OSError(errno.EIO, f"{num_bytes} bytes are missing in a file that is being copied")
            count = os.pwrite(target, data, target_offset)
        num_bytes, source_offset, target_offset = num_bytes - count, source_offset + count, target_offset + count


class Output:
    """The files of one output, under temporary names in the state folder."""

    def __init__(
        self,
        folder: Path,
        number: int,
        prefixes: list[str],
        rejects: str,
        dtype: np.dtype,
        lines_before: Callable[[int], int],
    ) -> None:
        self.folder, self.number, self.prefixes, self.dtype = folder, number, prefixes, dtype
        self._lines_before = lines_before
        self.rejects_final = Path(rejects)
        self.keys = [KeyTotals() for _ in prefixes]
        self.sources: dict[int, SourceTotals] = {}
        self.rejects = (0, 0)
        self._tokens: list[int] = []
        self._indexes: list[int] = []
        self._rejects_file: int | None = None

    def path(self, key: int, kind: str) -> Path:
        """Temporary name of a key's `bin`, `idx` or `manifest.json`."""
        return self.folder / f"output-{self.number}.{key}.{kind}"

    @property
    def rejects_path(self) -> Path:
        """Temporary name of the rejects."""
        return self.folder / f"output-{self.number}.rejects.jsonl"

    def open(self) -> None:
        """Open or create the files, unless they are open."""
        if self._tokens:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._tokens = [os.open(self.path(k, "bin"), flags, 0o644) for k in range(len(self.keys))]
        self._indexes = [os.open(self.path(k, "idx"), flags, 0o644) for k in range(len(self.keys))]

    def close(self) -> None:
        """Close the files; closing twice does nothing."""
        for descriptor in [*self._tokens, *self._indexes, *([self._rejects_file] if self._rejects_file else [])]:
            os.close(descriptor)
        self._tokens, self._indexes, self._rejects_file = [], [], None

    def place(self, result: ChunkResult) -> list[Place]:
        """Take the next chunk into the books; gives the place of each key's bytes."""
        places = []
        for k, (totals, key) in enumerate(zip(self.keys, result.keys, strict=True)):
            lengths_end = HEADER.size + 4 * totals.num_documents
            places.append(Place(self.path(k, "bin"), totals.tokens_bytes, self.path(k, "idx"), lengths_end))
            totals.crc32 = combine(totals.crc32, key.tokens_crc32, key.tokens_bytes)
            totals.num_documents += key.num_documents
            totals.num_empty += key.num_empty
            totals.num_tokens += key.num_tokens
            totals.tokens_bytes += key.tokens_bytes
        return places

    def add_sources(self, result: ChunkResult) -> None:
        """Add what the next chunk read to the totals of its files; after its rejects were added."""
        for span in result.spans:
            self.sources.setdefault(span.source, SourceTotals()).add(span)

    def end_source(self, source: int, digests: list[str]) -> None:
        """A stream was read to its end; its hashes come only now."""
        self.sources.setdefault(source, SourceTotals()).add_digests(digests)

    def forget(self) -> None:
        """Begin the books again; what the files hold will be written over."""
        self.keys = [KeyTotals() for _ in self.prefixes]
        self.sources, self.rejects = {}, (0, 0)

    def add_rejects(self, result: ChunkResult, names: list[str]) -> None:
        """Append the next chunk's rejects, with the place of each in its file."""
        if not result.rejects_bytes:
            return
        with rejects_file(self.folder, result.part).open("rb") as file:
            file.seek(result.rejects_offset)
            lines = file.read(result.rejects_bytes).splitlines()
        entries = []
        for line in lines:
            entry = orjson.loads(line)
            source = entry.pop("source")
            before = self.sources[source].num_lines if source in self.sources else 0
            name, number = names[source], self._lines_before(source) + before + entry.pop("line") + 1
            entries.append(orjson.dumps({"file": name, "line": number, **entry}) + b"\n")
        data = b"".join(entries)
        if self._rejects_file is None:
            self._rejects_file = os.open(self.rejects_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        offset, checksum = self.rejects
        if os.pwrite(self._rejects_file, data, offset) != len(data):
            raise OSError(errno.ENOSPC, "No space left on device", str(self.rejects_path))
        self.rejects = offset + len(data), crc32(data, checksum)

    def holds(self, result: ChunkResult) -> bool:
        """Whether the next chunk, moved by an earlier process, is unharmed in its place."""
        for k, (totals, key) in enumerate(zip(self.keys, result.keys, strict=True)):
            lengths_end = HEADER.size + 4 * totals.num_documents
            if _checksum(self._tokens[k], totals.tokens_bytes, key.tokens_bytes) != key.tokens_crc32:
                return False
            if _checksum(self._indexes[k], lengths_end, key.lengths_bytes) != key.lengths_crc32:
                return False
        return True

    def holds_rejects(self, rejects: tuple[int, int]) -> bool:
        """Whether the rejects that an earlier process wrote are unharmed."""
        if not rejects[0]:
            return True
        if not self.rejects_path.exists():
            return False
        with self.rejects_path.open("rb") as file:
            return _checksum(file.fileno(), 0, rejects[0]) == rejects[1]

    def flush(self) -> None:
        """Bring what was copied so far to the disk."""
        for descriptor in self._tokens:
            os.fdatasync(descriptor)

    def finish(self) -> None:
        """Complete the files: index, exact sizes, flushed to disk. All copies must be done."""
        for k, totals in enumerate(self.keys):
            os.ftruncate(self._tokens[k], totals.tokens_bytes)
            os.ftruncate(self._indexes[k], HEADER.size + 4 * totals.num_documents)
            lengths = np.zeros(0, dtype=np.int32)
            if totals.num_documents:
                lengths = np.memmap(
                    self.path(k, "idx"), mode="r", dtype=np.int32, offset=HEADER.size, shape=(totals.num_documents,)
                )
            with os.fdopen(os.dup(self._indexes[k]), "r+b") as file:
                write_header(file, self.dtype, totals.num_documents, totals.num_documents)
                file.seek(0, os.SEEK_END)
                write_index_tail(file, lengths, self.dtype.itemsize)
            os.fsync(self._tokens[k])
            os.fsync(self._indexes[k])
        if self._rejects_file is not None:
            os.ftruncate(self._rejects_file, self.rejects[0])
            os.fsync(self._rejects_file)
        self.close()

    def commit(self) -> None:
        """Give all files their final names: tokens, index, then the manifest, the mark of completeness.

        An old output of the same name stays until here. May be called again after it was cut off.
        """
        for k, prefix in enumerate(self.prefixes):
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
            if self.path(k, "bin").exists():
                manifest_path(prefix).unlink(missing_ok=True)
                idx_path(prefix).unlink(missing_ok=True)
                if k == 0:
                    self.rejects_final.unlink(missing_ok=True)
                self.path(k, "bin").replace(bin_path(prefix))
            _replace(self.path(k, "idx"), idx_path(prefix))
        _replace(self.rejects_path, self.rejects_final)
        for folder in {Path(prefix).parent for prefix in self.prefixes}:
            fsync_path(folder)
        for k, prefix in enumerate(self.prefixes):
            _replace(self.path(k, "manifest.json"), manifest_path(prefix))
            fsync_path(Path(prefix).parent)

    def is_committed(self) -> bool:
        """Whether all files have their final names."""
        return all(p.exists() for prefix in self.prefixes for p in (bin_path(prefix), manifest_path(prefix)))


def _replace(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # there is none, or an earlier process, cut off here, renamed it
        source.replace(target)


def _checksum(descriptor: int, offset: int, num_bytes: int) -> int:
    checksum = 0
    while num_bytes and (data := os.pread(descriptor, min(num_bytes, READ_BYTES), offset)):
        checksum = crc32(data, checksum)
        offset, num_bytes = offset + len(data), num_bytes - len(data)
    return checksum if not num_bytes else -1


def part_holds(folder: Path, result: ChunkResult) -> bool:
    """Whether a chunk that was not moved yet is unharmed in its part."""
    try:
        for k, key in enumerate(result.keys):
            with part_file(folder, result.part, k, "tokens").open("rb") as file:
                if _checksum(file.fileno(), key.tokens_offset, key.tokens_bytes) != key.tokens_crc32:
                    return False
            with part_file(folder, result.part, k, "lengths").open("rb") as file:
                if _checksum(file.fileno(), key.lengths_offset, key.lengths_bytes) != key.lengths_crc32:
                    return False
        if result.rejects_bytes:
            size = rejects_file(folder, result.part).stat().st_size
            return size >= result.rejects_offset + result.rejects_bytes
    except FileNotFoundError:
        return False
    return True
