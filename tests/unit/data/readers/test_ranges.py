"""Ranges of a file, read by whoever encodes them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import xxhash

from pretrainkit.data.readers import text
from pretrainkit.data.readers.records import RecordRules
from pretrainkit.data.readers.source import FileRange, RangeCounts
from pretrainkit.data.readers.text import TextLines, lines_between
from pretrainkit.errors import DataError

RULES = RecordRules(("text",))


@pytest.mark.parametrize("batch_bytes", [1, 7, 60, 1 << 20])
def test_a_span_read_in_batches_holds_what_its_lines_hold_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr(text, "BATCH_BYTES", batch_bytes)
    generator = random.Random(batch_bytes)
    lines = [b"x" * generator.choice([0, 1, 5, 40, 300]) for _ in range(200)]
    data = b"\xef\xbb\xbf" + b"\n".join([*lines, b"\xff", b"end"])
    path = tmp_path / "in.txt"
    path.write_bytes(data)
    source = TextLines(str(path), len(data), 0, "in")
    for begin in range(0, len(data), 500):
        end = min(begin + 500, len(data))
        with path.open("rb") as file:
            inside, nominal = lines_between(file, begin, end)
        (whole,) = source.parse(inside, begin == 0, RULES)
        result = RangeCounts(0)
        parts = list(source.read(FileRange(0, begin, end, 0, 1, end - begin), RULES, result))
        assert [line for part in parts for line in part.texts[0]] == whole.texts[0]
        assert [number for part in parts for number in part.lines] == whole.lines
        assert [reject for part in parts for reject in part.rejects] == whole.rejects
        assert sum(part.num_blank for part in parts) == whole.num_blank
        assert parts[-1].num_lines == whole.num_lines
        assert (result.digests, result.num_bytes) == ([xxhash.xxh3_128_hexdigest(nominal)], len(inside))


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"a\nb\n")
    source = TextLines(str(path), 9, 0, "in")
    with pytest.raises(DataError, match="shorter"):
        list(source.read(FileRange(0, 0, 9, 0, 1, 9), RULES, RangeCounts(0)))


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 100])
def test_lines_before_a_range_are_those_of_earlier_ranges(tmp_path: Path, step: int) -> None:
    data = b"a\n\nlonger line\nb\n\nthe end"
    path = tmp_path / "in.txt"
    path.write_bytes(data)
    source, num_lines = TextLines(str(path), len(data), 0, "in"), 0
    for begin in range(0, len(data), step):
        end = min(begin + step, len(data))
        with path.open("rb") as file:
            inside, _ = lines_between(file, begin, end)
        if inside:
            assert source.lines_before(begin) == num_lines
        num_lines += len(inside.splitlines())
