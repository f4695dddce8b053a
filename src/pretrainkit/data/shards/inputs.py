"""The input of one shard, read in order and in blocks, with its lines counted and its bytes hashed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from pretrainkit.data.readers.chunks import Span, Unit
from pretrainkit.data.readers.documents import Batch, RecordRules, read_lines_between
from pretrainkit.data.readers.sources import Source
from pretrainkit.data.readers.streams import BLOCK_BYTES, PieceHash, read_blocks
from pretrainkit.data.readers.tables import open_arrow, read_rows
from pretrainkit.data.shards.format import ShardInput
from pretrainkit.data.shards.task import Block
from pretrainkit.errors import DataError


@dataclass
class _Read:
    """What was read of a source."""

    first_span: Span
    num_bytes: int = 0
    num_lines: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)


class ShardReader:
    """Reads a shard's units once."""

    def __init__(self, sources: list[Source], units: list[Unit], rules: RecordRules) -> None:
        self._sources, self._units, self._rules = sources, units, rules
        self._read: dict[int, _Read] = {}
        self.total_bytes = sum(span.num_bytes for unit in units for span in unit.spans)
        """On disk."""

    def inputs(self) -> tuple[ShardInput, ...]:
        """What was read, once all blocks were taken."""
        found = ((self._sources[number], read) for number, read in self._read.items())
        return tuple(
            ShardInput(source.path, source.num_bytes, source.modified_ns, read.num_bytes, read.digest.hexdigest())
            for source, read in found
        )

    def blocks(self, key_prefix: str) -> Iterator[Block]:
        """The records, block by block. Raises DataError for a damaged file."""
        begin = 0  # line of the shard that the source's part begins with
        for unit in self._units:
            for span in unit.spans:
                read = self._read.get(span.source)
                if read is None:
                    begin += sum(other.num_lines for other in [*self._read.values()][-1:])
                    read = self._read[span.source] = _Read(span)
                source = self._sources[span.source]
                for data, batch, disk_bytes in self._pieces(source, span, read):
                    first_line = read.num_lines
                    yield Block(
                        source=span.source,
                        key_prefix=key_prefix,
                        first_line=begin + first_line,
                        first_line_in_source=first_line,
                        at_start=span.begin == 0 and read.num_bytes == 0,
                        format_of=source,
                        data=data,
                        batch=batch,
                        disk_bytes=disk_bytes,
                    )
                    read.num_lines += batch.num_lines if batch else data.count(b"\n") + (data[-1:] not in (b"\n", b""))
                    read.num_bytes += len(data) or disk_bytes

    def _pieces(self, source: Source, span: Span, read: _Read) -> Iterator[tuple[bytes, Batch | None, int]]:
        """Bytes or rows, and their share of the file on disk."""
        if source.format in ("parquet", "arrow"):
            read.digest.update(_digest_of_pieces(source, span))
            for batch in read_rows(source, span.begin, span.end, self._rules):
                yield b"", _rows_from_zero(batch), 0
            return
        if source.is_stream or source.format == "txt-file":
            hashed, position = PieceHash(), 0
            for data, offset in read_blocks(source, hashed):
                yield data, None, offset - position
                position = offset
            read.digest.update("".join(hashed.finish()).encode())
            return
        data, nominal, _ = read_lines_between(source.path, span.begin, span.end)
        if len(nominal) != span.end - span.begin:
            raise DataError("the file became shorter while it was read", where=source.path)
        read.digest.update(xxhash.xxh3_128_hexdigest(nominal).encode())
        if data:
            yield data, None, span.num_bytes

    def lines_before(self, number: int) -> int:
        """Lines, or rows, of a source that belong to earlier shards."""
        source, span = self._sources[number], self._read[number].first_span
        if span.begin == 0:
            return 0
        if source.format == "parquet":
            import pyarrow.parquet as pq

            with pq.ParquetFile(source.path) as file:
                return sum(file.metadata.row_group(group).num_rows for group in range(span.begin))
        if source.format == "arrow":
            import pyarrow as pa

            with pa.memory_map(source.path) as memory:
                batches = open_arrow(memory)[1]
                return sum(next(batches).num_rows for _ in range(span.begin))
        lines = 0
        for begin in range(0, span.begin, BLOCK_BYTES):
            with Path(source.path).open("rb") as file:
                file.seek(begin)
                lines += file.read(min(BLOCK_BYTES, span.begin - begin)).count(b"\n")
        return lines


def _rows_from_zero(batch: Batch) -> Batch:
    """A batch whose lines count from its own first row, without what can't go to another process."""
    rows = len(batch.lines) + len(batch.rejects)
    first = min([*batch.lines[:1], *(bad.line for bad in batch.rejects[:1])], default=0)
    return Batch(
        texts=batch.texts,
        lines=[line - first for line in batch.lines],
        rejects=[type(bad)(bad.line - first, bad.found, bad.raw) for bad in batch.rejects],
        num_blank=batch.num_blank,
        num_lines=rows,
        num_replaced=batch.num_replaced,
    )


def _digest_of_pieces(source: Source, span: Span) -> bytes:
    digests = []
    with Path(source.path).open("rb", buffering=0) as file:
        file.seek(span.first_piece * BLOCK_BYTES)
        for _ in range(span.first_piece, span.end_piece):
            digests.append(xxhash.xxh3_128_hexdigest(file.read(BLOCK_BYTES)))
    return "".join(digests).encode()
