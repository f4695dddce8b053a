"""The records of a span of an input file, read by whoever encodes it, with the hashes of what was read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import xxhash

from pretrainkit.data.chunks import Span, Unit
from pretrainkit.data.documents import BATCH_BYTES, Batch, RecordRules, parse_text, read_lines_between
from pretrainkit.data.sources import Source
from pretrainkit.data.streams import BLOCK_BYTES, PieceHash, read_blocks
from pretrainkit.data.tables import read_rows
from pretrainkit.errors import DataError

SAMPLE_BATCHES = 4


def read_span(source: Source, span: Span, rules: RecordRules) -> tuple[list[str], int, Iterable[Batch]]:
    """Digests of the span's pieces, its decompressed bytes, and its records. Not for streams."""
    if source.format in ("parquet", "arrow"):
        return _piece_digests(source, span), span.num_bytes, read_rows(source, span.begin, span.end, rules)
    if source.format == "txt-file":
        whole = Path(source.path).read_bytes()
        return _piece_digests(source, span), len(whole), parse_text(source, whole, True, rules)
    data, nominal, _ = read_lines_between(source.path, span.begin, span.end)
    if len(nominal) != span.end - span.begin:
        raise DataError("the file became shorter while it was read", where=source.path)
    batches = parse_text(source, data, span.begin == 0, rules, BATCH_BYTES)
    return [xxhash.xxh3_128_hexdigest(nominal)], len(data), batches


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
