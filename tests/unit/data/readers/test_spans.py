"""Spans of an input, read by whoever encodes them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import xxhash

from pretrainkit.data.indexed.results import SpanResult
from pretrainkit.data.readers import spans
from pretrainkit.data.readers.chunks import Span
from pretrainkit.data.readers.documents import RecordRules, parse_text, read_lines_between
from pretrainkit.data.readers.sources import Source
from pretrainkit.errors import DataError

RULES = RecordRules(("text",))


@pytest.mark.parametrize("batch_bytes", [1, 7, 60, 1 << 20])
def test_a_span_read_in_batches_holds_what_its_lines_hold_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr(spans, "BATCH_BYTES", batch_bytes)
    generator = random.Random(batch_bytes)
    lines = [b"x" * generator.choice([0, 1, 5, 40, 300]) for _ in range(200)]
    data = b"\xef\xbb\xbf" + b"\n".join([*lines, b"\xff", b"end"])
    path = tmp_path / "in.txt"
    path.write_bytes(data)
    source = Source(str(path), "txt", "", len(data), 0, "in")
    for begin in range(0, len(data), 500):
        end = min(begin + 500, len(data))
        text, nominal, _ = read_lines_between(str(path), begin, end)
        (whole,) = parse_text(source, text, begin == 0, RULES)
        result = SpanResult(0)
        parts = list(spans.read_span(source, Span(0, begin, end, 0, 1, end - begin), RULES, result))
        assert [line for part in parts for line in part.texts[0]] == whole.texts[0]
        assert [number for part in parts for number in part.lines] == whole.lines
        assert [reject for part in parts for reject in part.rejects] == whole.rejects
        assert sum(part.num_blank for part in parts) == whole.num_blank
        assert parts[-1].num_lines == whole.num_lines
        assert (result.digests, result.num_bytes) == ([xxhash.xxh3_128_hexdigest(nominal)], len(text))


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"a\nb\n")
    source = Source(str(path), "txt", "", 9, 0, "in")
    with pytest.raises(DataError, match="shorter"):
        list(spans.read_span(source, Span(0, 0, 9, 0, 1, 9), RULES, SpanResult(0)))
