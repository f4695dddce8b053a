"""One output while it is put together, under temporary names in the state folder; then its files get their names."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from pretrainkit.data.indexed.crc import combine, crc32
from pretrainkit.data.indexed.encoded_chunk import EncodedChunk, KeyCounts, OutputOffset
from pretrainkit.data.indexed.file_bytes import checksum, opened, write_at
from pretrainkit.data.indexed.format import HEADER, bin_path, idx_path, write_header, write_index_tail
from pretrainkit.data.indexed.manifest import manifest_path
from pretrainkit.data.readers.source import RangeCounts
from pretrainkit.files import fsync_path


@dataclass
class SourceTotals(RangeCounts):
    """What was read of one input file so far, in order."""

    num_pieces: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)
    """Over the digests of the pieces."""

    def add(self, counts: RangeCounts) -> None:
        """Add the next range of the file."""
        for name in ("num_lines", "num_records", "num_blank", "num_rejected", "num_replaced", "num_bytes"):
            setattr(self, name, getattr(self, name) + getattr(counts, name))
        earlier = self.num_tokens or [0] * len(counts.num_tokens)
        self.num_tokens = [a + b for a, b in zip(earlier, counts.num_tokens, strict=True)]
        self.digest.update(bytes.fromhex("".join(counts.digests)))
        self.num_pieces += len(counts.digests)


class Output:
    """The files of one output. Chunks are added to its counts in order; their data may be written later."""

    def __init__(
        self,
        folder: Path,
        number: int,
        prefixes: list[str],
        rejects: str,
        dtype: np.dtype,
        locate: Callable[[int, int], tuple[str, int]],
    ) -> None:
        """`locate` gives the path of a source, and the number in it of a line counted from where this run begins."""
        self.folder, self.number, self.prefixes, self.dtype = folder, number, prefixes, dtype
        self._locate = locate
        self._rejects_final, self._rejects_path = Path(rejects), folder / f"output-{number}.rejects.jsonl"
        self.keys = [KeyCounts() for _ in prefixes]
        self.sources: dict[int, SourceTotals] = {}
        self.rejects = (0, 0)
        """Bytes and CRC-32."""

    def path(self, key: int, kind: str) -> Path:
        """Temporary name of a key's `bin`, `idx` or `manifest.json`."""
        return self.folder / f"output-{self.number}.{key}.{kind}"

    @cached_property
    def files(self) -> list[tuple[Path, Path]]:
        """Per key: the temporary .bin and .idx, which are created when first asked for."""
        files = [(self.path(k, "bin"), self.path(k, "idx")) for k in range(len(self.keys))]
        for path in itertools.chain(*files):
            path.touch()
        return files

    def offsets(self) -> list[OutputOffset]:
        """Where the next chunk belongs."""
        return [OutputOffset(key.tokens_bytes, HEADER.size + key.lengths_bytes) for key in self.keys]

    def add(self, chunk: EncodedChunk, rejects: bytes = b"") -> None:
        """Count the next chunk, and append its rejects, which get their line numbers in their files."""
        if rejects:
            self._append_rejects(rejects, chunk)
        for totals, key in zip(self.keys, chunk.keys, strict=True):
            totals.tokens_crc32 = combine(totals.tokens_crc32, key.tokens_crc32, key.tokens_bytes)
            totals.num_documents += key.num_documents
            totals.num_empty += key.num_empty
            totals.num_tokens += key.num_tokens
            totals.tokens_bytes += key.tokens_bytes
        for counts in chunk.ranges:
            self.sources.setdefault(counts.source, SourceTotals(counts.source)).add(counts)

    def first_lines(self, chunk: EncodedChunk) -> list[int]:
        """Number of the first line of each range of the next chunk, counted from where this run begins in the file."""
        first = []
        for number, counts in enumerate(chunk.ranges):
            earlier = [other for other in chunk.ranges[:number] if other.source == counts.source]
            totals = self.sources.get(counts.source)
            first.append(sum(other.num_lines for other in (*earlier, *([totals] if totals else []))))
        return first

    def _append_rejects(self, rejects: bytes, chunk: EncodedChunk) -> None:
        first_lines, entries = self.first_lines(chunk), []
        for line in rejects.splitlines():
            entry = orjson.loads(line)
            number = entry.pop("range")
            path, line_number = self._locate(chunk.ranges[number].source, first_lines[number] + entry.pop("line"))
            entries.append(orjson.dumps({"file": path, "line": line_number, **entry}) + b"\n")
        data = b"".join(entries)
        with opened(self._rejects_path, os.O_WRONLY | os.O_CREAT) as descriptor:
            write_at(descriptor, self.rejects[0], data)
        self.rejects = self.rejects[0] + len(data), crc32(data, self.rejects[1])

    def holds(self, chunk: EncodedChunk, rejects: tuple[int, int]) -> bool:
        """Whether the next chunk, placed by an earlier process, is undamaged, and so are the rejects up to it."""
        for (tokens, lengths), offset, key in zip(self.files, self.offsets(), chunk.keys, strict=True):
            if checksum(tokens, offset.tokens, key.tokens_bytes) != key.tokens_crc32:
                return False
            if checksum(lengths, offset.lengths, key.lengths_bytes) != key.lengths_crc32:
                return False
        begin, before = self.rejects
        return checksum(self._rejects_path, begin, rejects[0] - begin, before) == rejects[1]

    def flush(self) -> None:
        """Bring the tokens that were written so far to the disk."""
        for tokens, _ in self.files:
            fsync_path(tokens)

    def finish(self) -> None:
        """Complete the files: index, exact sizes, flushed to disk. All data must have been written."""
        for (tokens, index), totals in zip(self.files, self.keys, strict=True):
            os.truncate(tokens, totals.tokens_bytes)
            os.truncate(index, HEADER.size + totals.lengths_bytes)
            lengths = np.zeros(0, dtype=np.int32)
            if totals.num_documents:
                shape = (totals.num_documents,)
                lengths = np.memmap(index, mode="r", dtype=np.int32, offset=HEADER.size, shape=shape)
            with index.open("r+b") as file:
                write_header(file, self.dtype, totals.num_documents, totals.num_documents)
                file.seek(0, os.SEEK_END)
                write_index_tail(file, lengths, self.dtype.itemsize)
            fsync_path(tokens)
            fsync_path(index)
        if self.rejects[0]:
            os.truncate(self._rejects_path, self.rejects[0])
            fsync_path(self._rejects_path)
        else:
            self._rejects_path.unlink(missing_ok=True)

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
                    self._rejects_final.unlink(missing_ok=True)
                self.path(k, "bin").replace(bin_path(prefix))
            _replace(self.path(k, "idx"), idx_path(prefix))
        _replace(self._rejects_path, self._rejects_final)
        folders = {Path(prefix).parent for prefix in self.prefixes}
        for folder in folders:
            fsync_path(folder)
        for k, prefix in enumerate(self.prefixes):
            _replace(self.path(k, "manifest.json"), manifest_path(prefix))
        for folder in folders:
            fsync_path(folder)

    def is_committed(self) -> bool:
        """Whether all files have their final names."""
        return all(p.exists() for prefix in self.prefixes for p in (bin_path(prefix), manifest_path(prefix)))


def _replace(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # there is none, or an earlier process, cut off here, renamed it
        source.replace(target)
