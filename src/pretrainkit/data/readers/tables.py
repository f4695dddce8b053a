"""Parquet files and saved Arrow datasets: a record is a row, and its texts are in the wanted columns."""

from __future__ import annotations

import contextlib
import json
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from pretrainkit.data.readers.records import NAME_THE_KEY, BadText, Batch, RecordRules, Reject, check_label, check_text
from pretrainkit.data.readers.source import BLOCK_BYTES, Block, FileRange, RangeCounts, Source
from pretrainkit.errors import DataError, RequestError

ROWS_PER_BATCH = 2048
"""Rows that are in memory as Python strings at a time."""


class Table(Source):
    """A range is a range of row groups or record batches: the groups of the file."""

    kind: ClassVar[str]

    @abstractmethod
    def _layout(self) -> tuple[list[str], list[int], list[int]]:
        """Names of the columns; bytes and rows of each group."""

    @abstractmethod
    def _tables(self, begin: int, end: int, keys: tuple[str, ...]) -> Iterator[Any]:
        """These columns of some groups."""

    def split(self, number: int, keys: tuple[str, ...]) -> Iterator[FileRange]:
        import pyarrow as pa

        try:
            names, sizes, _ = self._layout()
        except pa.ArrowInvalid as error:
            raise RequestError(f"not a readable {self.kind} file: {error}", where=self.path) from error
        if missing := [key for key in keys if key not in names]:
            raise RequestError(
                f"no column {', '.join(missing)}; it has {', '.join(names)}", where=self.path, action=NAME_THE_KEY
            )
        groups, begin, num_bytes = [], 0, 0
        for index, size in enumerate(sizes):
            if index > begin and num_bytes + size > BLOCK_BYTES:
                groups.append((begin, index))
                begin, num_bytes = index, 0
            num_bytes += size
        groups.append((begin, len(sizes)))
        # Each range hashes its share of the file's pieces, wherever its rows are.
        num_pieces, count = -(-self.num_bytes // BLOCK_BYTES), len(groups)
        for index, (begin, end) in enumerate(groups):
            first, last = (i * num_pieces // count for i in (index, index + 1))
            share = self.num_bytes * (index + 1) // count - self.num_bytes * index // count
            yield FileRange(number, begin, end, first, last, share)

    def read(self, part: FileRange, rules: RecordRules, counts: RangeCounts) -> Iterator[Batch]:
        counts.digests, counts.num_bytes = self.digests(part), part.num_bytes
        line = 0
        for rows in self._rows(part, rules.columns):
            yield _batch(rows, rules, line)
            line += len(rows)

    def blocks(self, part: FileRange, rules: RecordRules, counts: RangeCounts) -> Iterator[Block]:
        counts.digests = self.digests(part)
        for rows in self._rows(part, rules.columns):
            batch = _batch(rows, rules, 0)
            batch.raw = bytes  # what it was can't be sent to another process
            yield Block(b"", batch, 0)

    def lines_before(self, begin: int) -> int:
        return sum(self._layout()[2][:begin])

    def _rows(self, part: FileRange, keys: tuple[str, ...]) -> Iterator[list[tuple[Any, ...]]]:
        import pyarrow as pa

        try:
            for table in self._tables(part.begin, part.end, keys):
                for begin in range(0, table.num_rows, ROWS_PER_BATCH):
                    columns = [_values(table.column(key).slice(begin, ROWS_PER_BATCH)) for key in keys]
                    yield [*zip(*columns, strict=True)]
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"damaged {self.kind} file: {error}", where=self.path, action="copy or download the file again"
            ) from error


class Parquet(Table):
    """A Parquet file."""

    kind = "parquet"

    def _layout(self) -> tuple[list[str], list[int], list[int]]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
            return file.schema_arrow.names, [g.total_byte_size for g in groups], [g.num_rows for g in groups]

    def _tables(self, begin: int, end: int, keys: tuple[str, ...]) -> Iterator[Any]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            yield from file.iter_batches(ROWS_PER_BATCH, row_groups=range(begin, end), columns=list(keys))


class Arrow(Table):
    """An Arrow file of a saved dataset, streaming or random access."""

    kind = "arrow"

    def _layout(self) -> tuple[list[str], list[int], list[int]]:
        with self._open() as (names, batches):
            sizes = [(batch.nbytes, batch.num_rows) for batch in batches]
            return names, [num_bytes for num_bytes, _ in sizes], [num_rows for _, num_rows in sizes]

    def _tables(self, begin: int, end: int, keys: tuple[str, ...]) -> Iterator[Any]:
        with self._open() as (_, batches):
            yield from islice(batches, begin, end)

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[list[str], Iterator[Any]]]:
        """The column names and record batches."""
        import pyarrow as pa

        with pa.memory_map(self.path) as memory:
            is_random_access = memory.read(6) == b"ARROW1"
            memory.seek(0)
            if is_random_access:
                reader = pa.ipc.open_file(memory)
                yield reader.schema.names, (reader.get_batch(index) for index in range(reader.num_record_batches))
            else:
                stream = pa.ipc.open_stream(memory)
                yield stream.schema.names, iter(stream)


def _values(column: Any) -> list[Any]:
    """Of a column of strings that aren't UTF-8: their bytes."""
    import pyarrow as pa

    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return column.cast(pa.large_binary()).to_pylist()


def _batch(rows: list[tuple[Any, ...]], rules: RecordRules, first: int) -> Batch:
    """The records in rows, of which the first has this line number."""
    batch = Batch([[] for _ in rules.keys], num_lines=first + len(rows))
    batch.raw = partial(_row, rules.columns, rows, first)
    for line, row in enumerate(rows, first):
        try:
            checked = [check_text(key, value, rules) for key, value in zip(rules.keys, row, strict=False)]
            labels = [check_label(row[-1], rules.label_key)] if rules.label_key else []
        except BadText as bad:
            batch.rejects.append(Reject(line, str(bad), batch.raw(line)))
            continue
        batch.num_replaced += any(is_repaired for _, is_repaired in checked)
        for column, (text, _) in zip(batch.texts, checked, strict=True):
            column.append(text)
        batch.lines.append(line)
        batch.labels += labels
    return batch


def _row(keys: tuple[str, ...], rows: list[tuple[Any, ...]], first: int, number: int) -> bytes:
    """A row as JSON."""
    return json.dumps(dict(zip(keys, rows[number - first], strict=True)), default=repr).encode()
