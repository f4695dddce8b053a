from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from pretrainkit.data.readers.jsonl import JsonLines
from pretrainkit.data.readers.records import Batch, RecordRules
from pretrainkit.data.readers.source import Source
from pretrainkit.data.readers.text import TextFile, TextLines, lines_between

RULES = RecordRules(("text",))
KINDS: dict[str, type[Source]] = {"jsonl": JsonLines, "txt": TextLines, "txt-file": TextFile}


def parse(data: bytes, kind: str = "jsonl", rules: RecordRules = RULES, at_start: bool = True) -> Batch:
    (batch,) = KINDS[kind]("in", len(data), 0, "in").parse(data, at_start, rules)
    return batch


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_any_size_hold_every_line_once_and_in_order(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    lines = [b"x" * generator.choice([0, 1, 2, 5, 40, 300]) + b"\n" for _ in range(generator.randrange(60))]
    data = b"".join(lines)[: None if generator.random() < 0.5 else -1]
    path = tmp_path / "in"
    path.write_bytes(data)
    step = generator.randrange(1, 50)
    pieces, ranges = [], []
    for begin in range(0, len(data), step):
        with path.open("rb") as file:
            text, nominal = lines_between(file, begin, min(begin + step, len(data)))
        pieces.append(text)
        ranges.append(nominal)
    assert b"".join(pieces) == b"".join(ranges) == data
    assert all(piece.endswith(b"\n") for piece in list(filter(None, pieces))[:-1])


@pytest.mark.parametrize("kind", ["jsonl", "txt", "txt-file"])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("batch_bytes", [1, 13, 40, 1 << 20])
def test_batches_of_any_size_hold_what_one_batch_holds(kind: str, end: bytes, batch_bytes: int) -> None:
    records = [b'{"text": "%d"}' % number for number in range(9)]
    mixed = b"\xef\xbb\xbf" + b"\n".join([*records, b"", b'{"text": "\xff"}', b"  ", b'{"text": "end"}']) + end
    for data in (mixed, b"", b"\n"):
        source = KINDS[kind]("in", len(data), 0, "in")
        (whole,) = source.parse(data, True, RULES)
        parts = list(source.parse(data, True, RULES, batch_bytes))
        assert [text for part in parts for text in part.texts[0]] == whole.texts[0]
        assert [line for part in parts for line in part.lines] == whole.lines
        assert [reject for part in parts for reject in part.rejects] == whole.rejects
        assert sum(part.num_blank for part in parts) == whole.num_blank
        assert parts[-1].num_lines == whole.num_lines
        for part in parts:
            assert all(part.raw(line) == whole.raw(line) for line in part.lines)


def test_good_records_keep_their_line_numbers() -> None:
    batch = parse(b'\n{"text": "a"}\n  \n{"text": 1}\n{"x": {"text": "no"}, "text": "b"}')
    assert batch.texts == [["a", "b"]]
    assert (batch.lines, batch.num_blank, batch.num_lines) == ([1, 4], 2, 5)
    assert [(reject.line, reject.raw) for reject in batch.rejects] == [(3, b'{"text": 1}')]


def test_several_keys_are_good_together_or_rejected_together() -> None:
    data = b'{"a": "1", "b": "2"}\n{"a": "3"}\n{"b": "4", "a": 5}\n{"b": "6", "a": ""}\n'
    batch = parse(data, rules=RecordRules(("a", "b")))
    assert batch.texts == [["1", ""], ["2", "6"]]
    assert [reject.line for reject in batch.rejects] == [1, 2]


def test_a_byte_order_mark_counts_only_at_the_start() -> None:
    data = b'\xef\xbb\xbf{"text": "a"}\n'
    assert parse(data).texts == [["a"]]
    assert len(parse(data, at_start=False).rejects) == 1


def test_escapes_and_numbers_of_any_kind_are_read() -> None:
    record = {"id": 10**30, "text": '\u2028\t"\\/é🙂\u0001', "nested": [{"text": None}]}
    for ascii_only in (True, False):
        assert parse(json.dumps(record, ensure_ascii=ascii_only).encode()).texts == [[record["text"]]]


@pytest.mark.parametrize("size", [9, 10, 11])
def test_the_limit_is_in_bytes_of_text(size: int) -> None:
    rules = RecordRules(("text",), max_document_bytes=10)
    for ascii_only in (True, False):
        data = json.dumps({"text": "あ" * 3 + "x" * (size - 9)}, ensure_ascii=ascii_only).encode()
        assert len(parse(data, rules=rules).texts[0]) == (size <= 10)


def test_the_limit_of_a_line_of_text_counts_what_was_put_for_bad_bytes() -> None:
    rules = RecordRules(("text",), replace_bad_characters=True, max_document_bytes=10)
    batch = parse(b"\xff\xff\xff\n\xff\xff\xff\xff\nx\0\n" + b"y" * 10 + b"\r\n", kind="txt", rules=rules)
    assert batch.texts == [["\ufffd" * 3, "x\ufffd", "y" * 10]]
    assert [reject.line for reject in batch.rejects] == [1]
    assert batch.num_replaced == 2


def test_lines_of_text_are_documents() -> None:
    batch = parse(b"one\r\n\n  two \n", kind="txt")
    assert batch.texts == [["one", "  two "]]
    assert parse(b"one\n\ntwo\n", kind="txt-file").texts == [["one\n\ntwo\n"]]


@pytest.mark.parametrize("keys", [("text",), ("text", "title")], ids=["one key", "two keys"])
def test_records_have_labels_in_an_object_or_are_bad(keys: tuple[str, ...]) -> None:
    labels = [{"meta": {"source": "web"}}, {"meta.source": "books"}, {"meta": {"source": 3}}, {"meta": []}, {}]
    labels += [{"meta": {"source": " "}}, {"meta": {"source": "x" * 101}}, {"meta": {"source": "ウェブ"}}]
    lines = [json.dumps({"text": f"{i}", "title": "t", **label}).encode() for i, label in enumerate(labels)]
    batch = parse(b"\n".join(lines), rules=RecordRules(keys, label_key="meta.source"))
    assert batch.labels == ["web", "books", "ウェブ"]
    assert batch.texts[0] == ["0", "1", "7"]
    assert batch.without({1}).labels == ["web", "ウェブ"]
    assert [reject.found for reject in batch.rejects] == [
        "no label: 'meta.source' is number, a string of 1 to 100 characters is needed",
        "no label: there is no 'meta.source'",
        "no label: there is no 'meta.source'",
        "no label: 'meta.source' is blank, a string of 1 to 100 characters is needed",
        "no label: 'meta.source' is 101 characters long, a string of 1 to 100 characters is needed",
    ]
