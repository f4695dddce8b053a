"""Records out of a piece of an input file: the texts under the wanted keys, and what is wrong with the others."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pretrainkit.data.readers.sources import Source

BOM = b"\xef\xbb\xbf"
SHOWN_KEYS = 8
BATCH_BYTES = 1 << 17
"""Text that is read, parsed and then encoded at once: it stays in a core's cache (8% faster than 4 MiB; down to 128 KiB
there is no difference), and a worker holds little of it: 1 MiB made a process 12 MB larger."""
MAX_FOUND = 500
"""Characters of what is told about a bad record: a key may be a megabyte."""


@dataclass(frozen=True)
class RecordRules:
    """Which records are good."""

    keys: tuple[str, ...]
    replace_bad_characters: bool = False
    """Put U+FFFD for bytes and surrogates that are no text, and for NUL, instead of rejecting the record."""
    max_document_bytes: int = 0
    """Longer texts are rejected; 0 for no limit."""


@dataclass(frozen=True)
class Reject:
    """A bad record."""

    line: int
    """Counted from 0 within the piece."""
    found: str
    raw: bytes


@dataclass
class Batch:
    """Some records in order; a row of `texts` is a key, a column a good record."""

    texts: list[list[str]]
    lines: list[int] = field(default_factory=list)
    """Line of each good record, counted from 0 within the piece."""
    rejects: list[Reject] = field(default_factory=list)
    num_blank: int = 0
    num_lines: int = 0
    """Lines of the piece up to the end of this batch."""
    num_replaced: int = 0
    raw: Callable[[int], bytes] = bytes
    """The bytes of a line."""


class BadText(Exception):
    """Why a record is bad."""


def read_lines_between(path: str, begin: int, end: int) -> tuple[bytes, bytes, int]:
    """The lines whose first byte is in [begin, end), the bytes of that very range, and where those lines begin."""
    with Path(path).open("rb", buffering=0) as file:
        return lines_between(file.fileno(), begin, end)


def lines_between(descriptor: int, begin: int, end: int) -> tuple[bytes, bytes, int]:
    """The same of an open file."""
    nominal = _pread_all(descriptor, end - begin, begin)
    first = 0
    if begin and os.pread(descriptor, 1, begin - 1) != b"\n":
        first = nominal.find(b"\n") + 1
        if not first:  # all of it belongs to a line that began earlier
            return b"", nominal, end
    tail: list[bytes] = []
    offset, step, is_whole = begin + len(nominal), 1 << 14, first == len(nominal) or nominal.endswith(b"\n")
    while not is_whole and (data := os.pread(descriptor, step, offset)):
        offset, step = offset + len(data), min(2 * step, 1 << 24)
        line_end = data.find(b"\n")
        tail.append(data[: line_end + 1] if line_end >= 0 else data)
        is_whole = line_end >= 0
    if not (first or tail):
        return nominal, nominal, begin
    # One copy, not two: these may be large.
    return b"".join([memoryview(nominal)[first:], *tail]), nominal, begin + first


def _pread_all(descriptor: int, num_bytes: int, offset: int) -> bytes:
    parts = []
    while num_bytes and (data := os.pread(descriptor, num_bytes, offset)):
        parts.append(data)
        num_bytes, offset = num_bytes - len(data), offset + len(data)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_text(
    source: Source, data: bytes, at_start: bool, rules: RecordRules, batch_bytes: int = 0, first: int = 0
) -> Iterator[Batch]:
    """The records of whole lines of a text or JSON Lines file, in batches of about `batch_bytes`; 0: in one.

    `first` is the number of the first line.
    """
    if at_start and data.startswith(BOM):
        data = data[len(BOM) :]
    parse = _parse_json_lines if source.format == "jsonl" else _parse_plain
    is_whole = source.format == "txt-file"
    for part in [data] if is_whole or not batch_bytes else _parts_of_lines(data, batch_bytes):
        lines = [part] if is_whole else part.split(b"\n")
        if not (is_whole or lines[-1]):
            lines.pop()
        numbered = _Lines(lines, first)
        first += len(lines)
        batch = Batch([[] for _ in rules.keys], num_lines=first, raw=numbered.__getitem__)
        parse(numbered, rules, batch)
        yield batch


@dataclass(frozen=True)
class _Lines:
    """Some of a piece's lines; `first` is the number of the first of them."""

    lines: list[bytes]
    first: int

    def __getitem__(self, number: int) -> bytes:
        return self.lines[number - self.first]

    def numbered(self) -> Iterator[tuple[int, bytes]]:
        return enumerate(self.lines, self.first)


def _parts_of_lines(data: bytes, num_bytes: int) -> Iterator[bytes]:
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin + num_bytes - 1) + 1 or len(data)
        yield data[begin:end] if end - begin < len(data) else data
        begin = end
    if not data:
        yield data


def _parse_json_lines(lines: _Lines, rules: RecordRules, batch: Batch) -> None:
    loads, keys, limit = orjson.loads, rules.keys, rules.max_document_bytes or 1 << 62
    key, column, numbers = keys[0], batch.texts[0], batch.lines
    for number, line in lines.numbered():
        # A text is never longer than its JSON, so short lines need no count of bytes.
        if len(line) <= limit:
            try:
                record = loads(line)
                text = record[key]
                if type(text) is str and "\0" not in text:
                    if len(keys) == 1:
                        column.append(text)
                        numbers.append(number)
                        continue
                    texts = [record[name] for name in keys]
                    if all(type(other) is str and "\0" not in other for other in texts):
                        for row, other in zip(batch.texts, texts, strict=True):
                            row.append(other)
                        numbers.append(number)
                        continue
            except (ValueError, LookupError, TypeError):
                pass  # the careful way says what is wrong, or finds a blank line
        _add_carefully(number, line, rules, batch)


def _add_carefully(number: int, line: bytes, rules: RecordRules, batch: Batch) -> None:
    if not line.strip():
        batch.num_blank += 1
        return
    try:
        record, replaced = _load_record(line, rules.replace_bad_characters)
        texts = []
        for key in rules.keys:
            if key not in record:
                shown = ", ".join([*map(repr, record)][:SHOWN_KEYS]) or "none"
                more = ", ..." if len(record) > SHOWN_KEYS else ""
                raise BadText(f"no key {key!r}; the record's keys are {shown}{more}")
            text, mended = check_text(key, record[key], rules)
            texts.append(text)
            replaced |= mended
    except BadText as bad:
        batch.rejects.append(Reject(number, str(bad)[:MAX_FOUND], line))
        return
    batch.num_replaced += replaced
    for column, text in zip(batch.texts, texts, strict=True):
        column.append(text)
    batch.lines.append(number)


def _load_record(line: bytes, replace: bool) -> tuple[dict[str, Any], bool]:
    replaced = False
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        try:
            text = line.decode()
        except UnicodeDecodeError as unicode_error:
            if not replace:
                raise BadText(_invalid_utf8(line, unicode_error)) from None
            text, replaced = line.decode(errors="replace"), True
        try:
            # The standard library lets surrogates pass that orjson refuses; NaN and its kind are refused by both.
            record = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            hint = "; a JSON array over several lines is not JSON Lines" if line.lstrip()[:1] == b"[" else ""
            raise BadText(f"broken JSON: {error}{hint}") from None
    if not isinstance(record, dict):
        raise BadText(f"a JSON {_json_type(record)} where an object is needed")
    return record, replaced


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _invalid_utf8(line: bytes, error: UnicodeDecodeError) -> str:
    return f"invalid UTF-8: byte 0x{line[error.start]:02x} at byte {error.start} of the line"


def check_text(key: str, text: Any, rules: RecordRules) -> tuple[str, bool]:
    """The text, mended if the rules say so, and whether it was; BadText if it is no text or too long."""
    if not isinstance(text, str):
        raise BadText(f"{key!r} is {_json_type(text)}, a string is needed")
    mended = False
    if "\0" in text:
        if not rules.replace_bad_characters:
            raise BadText(f"{key!r} holds a NUL character at character {text.index(chr(0))}")
        text, mended = text.replace("\0", "\ufffd"), True
    try:
        num_bytes = len(text.encode()) if rules.max_document_bytes or not text.isascii() else 0
    except UnicodeEncodeError as error:
        if not rules.replace_bad_characters:
            raise BadText(f"{key!r} holds a lone surrogate at character {error.start}") from None
        text, mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
        num_bytes = len(text.encode())
    if rules.max_document_bytes and num_bytes > rules.max_document_bytes:
        raise BadText(f"{key!r} has {num_bytes} bytes, more than the {rules.max_document_bytes} allowed")
    return text, mended


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", int: "number", float: "number", bool: "boolean"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _parse_plain(lines: _Lines, rules: RecordRules, batch: Batch) -> None:
    limit = rules.max_document_bytes or 1 << 62
    for number, line in lines.numbered():
        if not line.strip():
            batch.num_blank += 1
            continue
        try:
            replaced = mended = False
            try:
                text = line.removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                if not rules.replace_bad_characters:
                    raise BadText(_invalid_utf8(line, error)) from None
                text, replaced = line.removesuffix(b"\r").decode(errors="replace"), True
            if replaced or b"\0" in line or len(line) > limit:  # nothing else can be wrong with what was decoded
                text, mended = check_text("text", text, rules)
        except BadText as bad:
            batch.rejects.append(Reject(number, str(bad), line))
            continue
        batch.num_replaced += replaced or mended
        for column in batch.texts:
            column.append(text)
        batch.lines.append(number)
