"""The records of a span of an input file, read by whoever encodes it, with the hashes of what was read."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import xxhash

from pretrainkit.data.indexed.results import SpanResult
from pretrainkit.data.readers.chunks import Span, Unit
from pretrainkit.data.readers.documents import (
    BATCH_BYTES,
    Batch,
    RecordRules,
    lines_between,
    parse_text,
    read_lines_between,
)
from pretrainkit.data.readers.sources import Source
from pretrainkit.data.readers.streams import BLOCK_BYTES, PieceHash, read_blocks
from pretrainkit.data.readers.tables import read_rows
from pretrainkit.errors import DataError

SAMPLE_BATCHES = 4


def read_span(source: Source, span: Span, rules: RecordRules, result: SpanResult) -> Iterator[Batch]:
    """The records of a span; once all are taken, `result` has its decompressed bytes and digests. Not for streams."""
    if source.format in ("parquet", "arrow"):
        result.digests, result.num_bytes = _piece_digests(source, span), span.num_bytes
        yield from read_rows(source, span.begin, span.end, rules)
    elif source.format == "txt-file":
        whole = Path(source.path).read_bytes()
        result.digests, result.num_bytes = _piece_digests(source, span), len(whole)
        yield from parse_text(source, whole, True, rules)
    else:
        yield from _read_lines(source, span, rules, result)


def _read_lines(source: Source, span: Span, rules: RecordRules, result: SpanResult) -> Iterator[Batch]:
    """A batch at a time: what a worker holds is counted as often as there are workers."""
    hashed, num_lines = xxhash.xxh3_128(), 0
    with Path(source.path).open("rb", buffering=0) as file:
        for begin in range(span.begin, span.end, BATCH_BYTES):
            end = min(begin + BATCH_BYTES, span.end)
            data, nominal, _ = lines_between(file.fileno(), begin, end)
            if len(nominal) != end - begin:
                raise DataError("the file became shorter while it was read", where=source.path)
            hashed.update(nominal)
            del nominal
            result.num_bytes += len(data)
            for batch in parse_text(source, data, begin == 0, rules, first=num_lines):
                num_lines = batch.num_lines
                yield batch
    result.digests = [hashed.hexdigest()]


def _piece_digests(source: Source, span: Span) -> list[str]:
    digests = []
    with Path(source.path).open("rb", buffering=0) as file:
        file.seek(span.first_piece * BLOCK_BYTES)
        for _ in range(span.first_piece, span.end_piece):
            digests.append(xxhash.xxh3_128_hexdigest(file.read(BLOCK_BYTES)))
    return digests


def sample_texts(sources: list[Source], unit: Unit, rules: RecordRules, num_bytes: int) -> Iterator[str]:
    """About so many bytes of text from the beginning of a unit or stream."""
    for batch in islice(_first_batches(sources, unit, rules, num_bytes), SAMPLE_BATCHES):
        for texts in zip(*batch.texts, strict=True):
            for text in texts:
                yield text[:num_bytes]
                num_bytes -= len(text.encode())
                if num_bytes <= 0:
                    return


def _first_batches(sources: list[Source], unit: Unit, rules: RecordRules, num_bytes: int) -> Iterator[Batch]:
    for span in unit.spans:
        source = sources[span.source]
        if unit.is_stream:
            for data, _ in islice(read_blocks(source, PieceHash()), 1):
                yield from parse_text(source, data[: data.rfind(b"\n", 0, 4 * num_bytes) + 1 or None], True, rules)
        elif source.format in ("parquet", "arrow"):
            yield from read_rows(source, span.begin, span.end, rules)
        else:
            data, _, _ = read_lines_between(source.path, span.begin, min(span.end, span.begin + 2 * num_bytes))
            yield from parse_text(source, data, span.begin == 0, rules)
