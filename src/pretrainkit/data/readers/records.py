"""What a reader gives: batches of records whose texts are good, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

MAX_ERROR_EXCERPT = 500
"""Characters of a message about a bad record: a key in it may be a megabyte."""
MAX_LABEL = 100
"""Characters: a longer one is a text."""

NAME_THE_KEY = "name the text's key or column: --json-keys (make_shards.py: --json_key, pack_dataset.py: --text_column)"


@dataclass(frozen=True)
class RecordRules:
    """Which records are good."""

    keys: tuple[str, ...]
    replace_bad_characters: bool = False
    """Put U+FFFD for invalid bytes, lone surrogates and NUL, instead of rejecting the record."""
    max_document_bytes: int = 0
    """Longer texts are rejected; 0 for no limit."""
    label_key: str = ""
    """Where a record says what it is of, such as its language; `a.b` is the key b of the object under a."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a table that are read."""
        return (*self.keys, self.label_key) if self.label_key else self.keys


@dataclass(frozen=True)
class Reject:
    """A bad record."""

    line: int
    """Counted from 0 within the piece."""
    found: str
    raw: bytes
    is_kept: bool = False
    """Whether it is only reported."""

    def action(self, otherwise: str) -> str:
        """What to do where it stops a run."""
        return f"{NAME_THE_KEY}; or {otherwise}" if self.found.startswith("no key ") else otherwise


@dataclass
class Batch:
    """Some records in order; a row of `texts` is a key, a column a good record."""

    texts: list[list[str]]
    lines: list[int] = field(default_factory=list)
    """Line of each good record, counted from 0 within the piece."""
    labels: list[str] = field(default_factory=list)
    """Label of each good record; empty when none is asked for."""
    rejects: list[Reject] = field(default_factory=list)
    num_blank: int = 0
    num_lines: int = 0
    """Lines of the piece up to the end of this batch."""
    num_replaced: int = 0
    raw: Callable[[int], bytes] = bytes
    """The bytes of a line."""

    def without(self, rows: set[int]) -> Batch:
        """The batch without some of its good records, by their place."""
        kept = [place for place in range(len(self.lines)) if place not in rows]
        texts = [[column[place] for place in kept] for column in self.texts]
        labels = [self.labels[place] for place in kept] if self.labels else []
        return replace(self, texts=texts, lines=[self.lines[place] for place in kept], labels=labels)


class BadText(Exception):
    """Why a record is bad."""


def check_text(key: str, text: Any, rules: RecordRules) -> tuple[str, bool]:
    """The text, repaired if the rules say so, and whether it was. Bytes are taken as UTF-8.

    Raises BadText if it is no text or too long.
    """
    is_repaired = False
    if isinstance(text, bytes):  # of a table
        try:
            text = text.decode()
        except UnicodeDecodeError as error:
            if not rules.replace_bad_characters:
                raise BadText(invalid_utf8(text, error)) from None
            text, is_repaired = text.decode(errors="replace"), True
    if not isinstance(text, str):
        raise BadText(f"{key!r} is {json_type(text)}, a string is needed")
    if "\0" in text:
        if not rules.replace_bad_characters:
            raise BadText(f"{key!r} holds a NUL character at character {text.index(chr(0))}")
        text, is_repaired = text.replace("\0", "\ufffd"), True
    try:
        num_bytes = len(text.encode()) if rules.max_document_bytes or not text.isascii() else 0
    except UnicodeEncodeError as error:
        if not rules.replace_bad_characters:
            raise BadText(f"{key!r} holds a lone surrogate at character {error.start}") from None
        text, is_repaired = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), True
        num_bytes = len(text.encode())
    if rules.max_document_bytes and num_bytes > rules.max_document_bytes:
        raise BadText(f"{key!r} has {num_bytes} bytes, more than the {rules.max_document_bytes} allowed")
    return text, is_repaired


def label_of(record: dict[str, Any], key: str) -> str:
    """What is under a key, or for `a.b` under b of the object under a. Raises BadText if that is no label."""
    value: Any = record
    for part in [key] if key in record else key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise BadText(f"no label: there is no {key!r}")
        value = value[part]
    return check_label(value, key)


def check_label(value: Any, key: str) -> str:
    """The label. Raises BadText."""
    if isinstance(value, str) and value.strip() and len(value) <= MAX_LABEL:
        return value
    what = json_type(value)
    if isinstance(value, str):
        what = f"{len(value)} characters long" if value.strip() else "blank"
    raise BadText(f"no label: {key!r} is {what}, a string of 1 to {MAX_LABEL} characters is needed")


def json_type(value: Any) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "object", list: "list", str: "string", int: "number", float: "number", bool: "boolean"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def invalid_utf8(line: bytes, error: UnicodeDecodeError) -> str:
    """Where a line is not UTF-8."""
    return f"invalid UTF-8: byte 0x{line[error.start]:02x} at byte {error.start} of the line"
