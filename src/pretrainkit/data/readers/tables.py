"""Records out of Parquet files and saved Arrow datasets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pretrainkit.data.readers.documents import BadText, Batch, RecordRules, Reject, check_text
from pretrainkit.data.readers.sources import Source
from pretrainkit.errors import DataError

ROWS_PER_BATCH = 2048
"""Rows that are in memory as Python strings at a time."""


def read_rows(source: Source, first: int, end: int, rules: RecordRules) -> Iterator[Batch]:
    """The records of row groups [first, end) of a Parquet file, or record batches of an Arrow file."""
    line = 0
    for table in _tables(source, first, end, rules.keys):
        for begin in range(0, table.num_rows, ROWS_PER_BATCH):
            part = table.slice(begin, ROWS_PER_BATCH)
            columns = [part.column(key).to_pylist() for key in rules.keys]
            batch = Batch([[] for _ in rules.keys], num_lines=line + part.num_rows)
            rows = list(zip(*columns, strict=True))
            batch.raw = _RawRows(rules.keys, rows, line).__getitem__
            for row in rows:
                try:
                    checked = [check_text(key, value, rules) for key, value in zip(rules.keys, row, strict=True)]
                except BadText as bad:
                    batch.rejects.append(Reject(line, str(bad), batch.raw(line)))
                else:
                    batch.num_replaced += any(mended for _, mended in checked)
                    for column, (text, _) in zip(batch.texts, checked, strict=True):
                        column.append(text)
                    batch.lines.append(line)
                line += 1
            yield batch


@dataclass
class _RawRows:
    """Rows of a table, as JSON."""

    keys: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    first: int

    def __getitem__(self, line: int) -> bytes:
        record = dict(zip(self.keys, self.rows[line - self.first], strict=True))
        return json.dumps(record, default=repr).encode()


def _tables(source: Source, first: int, end: int, keys: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow as pa

    try:
        yield from _read_tables(source, first, end, keys)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"damaged {source.format} file: {error}", where=source.path, action="copy or download the file again"
        ) from error


def _read_tables(source: Source, first: int, end: int, keys: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if source.format == "parquet":
        with pq.ParquetFile(source.path) as file:
            for batch in file.iter_batches(ROWS_PER_BATCH, row_groups=range(first, end), columns=list(keys)):
                yield pa.Table.from_batches([batch])
        return
    with pa.memory_map(source.path) as memory:
        for index, batch in enumerate(open_arrow(memory)[1]):
            if index >= end:
                return
            if index >= first:
                yield pa.Table.from_batches([batch]).select(list(keys))


def open_arrow(memory: Any) -> tuple[list[str], Iterator[Any]]:
    """The column names and record batches of an open Arrow file of either kind, streaming or random access."""
    import pyarrow as pa

    is_file = memory.read(6) == b"ARROW1"
    memory.seek(0)
    if is_file:
        reader = pa.ipc.open_file(memory)
        return reader.schema.names, (reader.get_batch(index) for index in range(reader.num_record_batches))
    stream = pa.ipc.open_stream(memory)
    return stream.schema.names, iter(stream)
