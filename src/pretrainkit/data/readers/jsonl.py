"""JSON Lines: a record is an object on a line, and its texts are strings under the wanted keys."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import orjson

from pretrainkit.data.readers.records import (
    MAX_ERROR_EXCERPT,
    BadText,
    Batch,
    RecordRules,
    Reject,
    check_text,
    invalid_utf8,
    json_type,
    label_of,
)
from pretrainkit.data.readers.text import LineSource

SHOWN_KEYS = 8


class JsonLines(LineSource):
    """A record is a line; blank lines are none."""

    def parse_lines(self, lines: Iterable[tuple[int, bytes]], rules: RecordRules, batch: Batch) -> None:
        loads, keys, limit = orjson.loads, rules.keys, rules.max_document_bytes or 1 << 62
        key, column, numbers, label_key = keys[0], batch.texts[0], batch.lines, rules.label_key
        for number, line in lines:
            # A text is never longer than its JSON, so short lines need no count of bytes.
            if len(line) <= limit:
                try:
                    record = loads(line)
                    text = record[key]
                    if type(text) is str and "\0" not in text:
                        if label_key:
                            label = label_of(record, label_key)
                        if len(keys) == 1:
                            column.append(text)
                            numbers.append(number)
                            if label_key:
                                batch.labels.append(label)
                            continue
                        texts = [record[name] for name in keys]
                        if all(type(other) is str and "\0" not in other for other in texts):
                            for row, other in zip(batch.texts, texts, strict=True):
                                row.append(other)
                            numbers.append(number)
                            if label_key:
                                batch.labels.append(label)
                            continue
                except (BadText, ValueError, LookupError, TypeError):
                    pass  # the careful way says what is wrong, or finds a blank line
            _add_carefully(number, line, rules, batch)


def _add_carefully(number: int, line: bytes, rules: RecordRules, batch: Batch) -> None:
    if not line.strip():
        batch.num_blank += 1
        return
    try:
        record, is_replaced = _load_record(line, rules.replace_bad_characters)
        texts = []
        for key in rules.keys:
            if key not in record:
                shown = ", ".join([*map(repr, record)][:SHOWN_KEYS]) or "none"
                more = ", ..." if len(record) > SHOWN_KEYS else ""
                raise BadText(f"no key {key!r}; the record's keys are {shown}{more}")
            text, is_repaired = check_text(key, record[key], rules)
            texts.append(text)
            is_replaced |= is_repaired
        labels = [label_of(record, rules.label_key)] if rules.label_key else []
    except BadText as bad:
        batch.rejects.append(Reject(number, str(bad)[:MAX_ERROR_EXCERPT], line))
        return
    batch.num_replaced += is_replaced
    for column, text in zip(batch.texts, texts, strict=True):
        column.append(text)
    batch.lines.append(number)
    batch.labels += labels


def _load_record(line: bytes, replace: bool) -> tuple[dict[str, Any], bool]:
    """The record, and whether bad bytes were replaced."""
    is_replaced = False
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        try:
            text = line.decode()
        except UnicodeDecodeError as unicode_error:
            if not replace:
                raise BadText(invalid_utf8(line, unicode_error)) from None
            text, is_replaced = line.decode(errors="replace"), True
        try:
            # The standard library accepts what orjson refuses: lone surrogates, NaN and Infinity, which Python writes.
            record = json.loads(text)
        except (ValueError, RecursionError):
            raise BadText(f"broken JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadText(f"a JSON {json_type(record)} where an object is needed")
    return record, is_replaced
