"""How inputs are cut into pieces of work. The cut depends on the inputs alone, never on the number of workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from pretrainkit.data.readers.sources import Source
from pretrainkit.data.readers.streams import BLOCK_BYTES
from pretrainkit.data.readers.tables import open_arrow
from pretrainkit.errors import RequestError

COMPRESSION_RATIO = 4
"""Assumed text per compressed byte, to weigh streams against plain files when work is split over jobs."""

MAX_SPANS = 256
"""Files in a unit: tasks and results must fit in a pipe's buffer, or parent and worker could wait for each other."""


@dataclass(frozen=True)
class Span:
    """A part of one file: bytes of a text file, row groups of a Parquet file, batches of an Arrow file."""

    source: int
    """Position in the list of sources."""
    begin: int
    end: int
    first_piece: int
    end_piece: int
    """Pieces of BLOCK_BYTES of the file whose hash is taken along with this span."""
    num_bytes: int
    """Its share of the file on disk."""


@dataclass(frozen=True)
class Unit:
    """What is handed to a worker at once (spans of one output), or a stream that is handed out block by block."""

    output: int
    spans: tuple[Span, ...]
    is_stream: bool

    @property
    def weight(self) -> int:
        """Estimated bytes of text."""
        return sum(span.num_bytes for span in self.spans) * (COMPRESSION_RATIO if self.is_stream else 1)


def cut(sources: list[Source], outputs: list[int], keys: tuple[str, ...]) -> list[Unit]:
    """The units of all sources in order; `outputs` gives the output that each source goes to.

    Small files of one output share a unit. Raises RequestError for a table without a wanted column.
    """
    units: list[Unit] = []
    group: list[Span] = []

    def close() -> None:
        if group:
            units.append(Unit(outputs[group[0].source], tuple(group), is_stream=False))
            group.clear()

    for number, source in enumerate(sources):
        if group and outputs[group[0].source] != outputs[number]:
            close()
        if source.is_stream:
            close()
            span = Span(number, 0, source.num_bytes, 0, 0, source.num_bytes)
            units.append(Unit(outputs[number], (span,), is_stream=True))
            continue
        for span in _spans(number, source, keys):
            size = sum(other.num_bytes for other in group) + span.num_bytes
            if size > BLOCK_BYTES or len(group) == MAX_SPANS:
                close()
            group.append(span)
    close()
    return units


def _spans(number: int, source: Source, keys: tuple[str, ...]) -> Iterator[Span]:
    size = source.num_bytes
    num_pieces = -(-size // BLOCK_BYTES)
    if source.format in ("parquet", "arrow"):
        parts = _table_parts(source, keys)
        for index, (begin, end) in enumerate(parts):
            first, last = (i * num_pieces // len(parts) for i in (index, index + 1))
            yield Span(number, begin, end, first, last, size * (index + 1) // len(parts) - size * index // len(parts))
    elif source.format == "txt-file":
        yield Span(number, 0, size, 0, num_pieces, size)
    else:
        for piece in range(num_pieces):
            begin, end = piece * BLOCK_BYTES, min(size, (piece + 1) * BLOCK_BYTES)
            yield Span(number, begin, end, piece, piece + 1, end - begin)


def _table_parts(source: Source, keys: tuple[str, ...]) -> list[tuple[int, int]]:
    """Ranges of row groups or record batches, about BLOCK_BYTES each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if source.format == "parquet":
            with pq.ParquetFile(source.path) as file:
                names = file.schema_arrow.names
                sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)]
        else:
            with pa.memory_map(source.path) as memory:
                names, batches = open_arrow(memory)
                sizes = [batch.nbytes for batch in batches]
    except pa.ArrowInvalid as error:
        raise RequestError(f"not a readable {source.format} file: {error}", where=source.path) from error
    missing = [key for key in keys if key not in names]
    if missing:
        raise RequestError(f"no column {', '.join(missing)}; it has {', '.join(names)}", where=source.path)
    parts, begin, room = [], 0, BLOCK_BYTES
    for index, size in enumerate(sizes):
        if index > begin and size > room:
            parts.append((begin, index))
            begin, room = index, BLOCK_BYTES
        room -= size
    return [*parts, (begin, len(sizes))] if sizes else [(0, 0)]


def shard(units: list[Unit], index: int, count: int) -> tuple[int, int]:
    """The range of units of one job of an array: contiguous, so that joining the jobs' outputs in order gives all.

    Every unit belongs to exactly one job; sizes are as even as the units allow.
    """
    total = sum(unit.weight for unit in units)
    bounds, done, position = [0], 0, 0
    for part in range(1, count):
        goal = total * part / count
        while position < len(units) and done + units[position].weight / 2 <= goal:
            done += units[position].weight
            position += 1
        bounds.append(position)
    bounds.append(len(units))
    return bounds[index], bounds[index + 1]


def fingerprint(units: list[Unit]) -> str:
    """Tells whether two tasks of an array have cut the same input in the same way; else records are lost or doubled."""
    cuts = [(span.source, span.begin, span.end) for unit in units for span in unit.spans]
    weights = [unit.weight for unit in units]
    return hashlib.sha256(repr((cuts, weights)).encode()).hexdigest()
