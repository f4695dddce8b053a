"""The evaluation sets that documents must not overlap with: files of JSON Lines or text, a set each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import xxhash

from pretrainkit.data.readers.compressed import Compressed
from pretrainkit.data.readers.inputs import resolve_inputs, stem_of
from pretrainkit.data.readers.jsonl import JsonLines
from pretrainkit.data.readers.records import RecordRules
from pretrainkit.data.readers.source import RangeCounts, Source
from pretrainkit.data.readers.text import BOM, LineSource
from pretrainkit.errors import RequestError
from pretrainkit.files import hash_file


@dataclass(frozen=True)
class Evaluations:
    """Evaluation sets, and what happens to documents that overlap with them."""

    sources: list[Source]
    num_words: int
    """Words in a row that are an overlap."""
    is_dropped: bool
    """Whether documents that overlap are left out; else they are only reported."""

    @property
    def names(self) -> list[str]:
        """Of the sets: the files' paths below the folder that was named, without suffixes."""
        return [stem_of(source) for source in self.sources]

    def identity(self) -> dict[str, Any]:
        """What decides which documents overlap, and what happens to them."""
        files = [
            [name, hash_file(Path(s.path), xxhash.xxh3_128)] for name, s in zip(self.names, self.sources, strict=True)
        ]
        return {
            "sets": xxhash.xxh3_128_hexdigest(orjson.dumps(files)),
            "num_words": self.num_words,
            "action": "drop" if self.is_dropped else "report",
        }

    def texts(self) -> Iterator[tuple[int, str]]:
        """The number of a set, and a text of it: of every record, or line of a text file.

        A record's text is that under the key `text`, else all strings in it, joined. Raises RequestError for what is
        no record.
        """
        for number, source in enumerate(self.sources):
            is_text = not isinstance(source.text if isinstance(source, Compressed) else source, JsonLines)
            for line_number, line in enumerate(_lines(source), 1):
                try:
                    record = line.decode() if is_text else orjson.loads(line)
                except ValueError as error:
                    raise RequestError(f"not a record: {error}", where=f"{source.path}:{line_number}") from error
                if isinstance(record, dict) and isinstance(record.get("text"), str):
                    record = record["text"]
                yield number, " ".join(_strings(record)).replace("\0", " ")


def find_evaluations(inputs: tuple[str, ...], num_words: int, action: str) -> Evaluations | None:
    """The evaluation sets in files, folders and globs; None where none are named. Raises RequestError."""
    if num_words < 1:
        raise RequestError(f"{num_words}", where="--decontaminate-words", needed="1 or more")
    if not inputs:
        return None
    sources = resolve_inputs(inputs)
    for source in sources:
        if not isinstance(source.text if isinstance(source, Compressed) else source, LineSource):
            needed = "evaluation sets as JSON Lines, or as text with a text a line"
            raise RequestError(
                "a table", where=source.path, needed=needed, action="convert it, or name the other files"
            )
    return Evaluations(sources, num_words, action == "drop")


def _lines(source: Source) -> Iterator[bytes]:
    """The lines of a file that aren't blank."""
    for part in source.split(0, ()):
        for block in source.blocks(part, RecordRules(()), RangeCounts(0)):
            yield from (line for line in block.data.removeprefix(BOM).split(b"\n") if line.strip())


def _strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value that are no keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
