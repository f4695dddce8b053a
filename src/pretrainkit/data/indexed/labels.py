"""Labels of documents, such as their language or source, by which a run shows its loss.

With --label-key they are in `<prefix>.labels`: a little-endian u32 for each document, the CRC-32 of its label in UTF-8,
so that workers, tasks of an array and merged sets agree without asking each other. The manifest names the labels.
Without them the names of the inputs are labels, as the manifest says how many tokens each has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from pretrainkit.errors import DataError

LABEL_BYTES = 4
MAX_LABELS = 1000
"""Of more, no table of losses can be read: the key holds something else."""
BLOCK = 1 << 20
"""Documents whose lengths are summed at once."""
MAX_FILES = 32
"""Input files above which their folders are the labels."""


@dataclass(frozen=True)
class LabelRecord:
    """The labels of a pair, for its manifest."""

    key: str
    """--label-key."""
    crc32: int
    """Of the .labels."""
    counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Documents and tokens of each label."""
    text_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes in UTF-8 of the texts of each label; empty in records of older versions."""


class DocumentLabels(Protocol):
    """The labels of a dataset's documents."""

    names: tuple[str, ...]
    sizes: Sequence[tuple[str, int, int]]
    """Labels with tokens and bytes of text, which are 0 where they are not known; a label may be there twice."""

    def codes(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The codes of some documents' labels."""


class StoredLabels:
    """The labels that --label-key has put in a file. Raises DataError when it isn't what its record says."""

    def __init__(self, prefix: Path | str, record: LabelRecord) -> None:
        path = labels_path(prefix)
        needed = LABEL_BYTES * sum(documents for documents, _ in record.counts.values())
        size = path.stat().st_size if path.is_file() else 0
        if size != needed:
            raise DataError(
                f"{size} bytes" if path.is_file() else "file not found",
                where=str(path),
                needed=f"{needed} bytes: the labels of the documents that its manifest counts",
                action="copy it again, with the rest of the pair, or preprocess again",
            )
        self.names = tuple(record.counts)
        self.sizes: Sequence[tuple[str, int, int]] = [
            (name, tokens, record.text_bytes.get(name, 0)) for name, (_, tokens) in record.counts.items()
        ]
        self._name_of = {label_code(name): name for name in self.names}
        self._codes = np.memmap(path, mode="r", dtype="<u4") if needed else np.zeros(0, dtype="<u4")

    def codes(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The codes of some documents' labels."""
        return self._codes[documents].astype(np.int64)

    def label_of(self, document: int) -> str:
        """The label of one document."""
        return self._name_of.get(int(self._codes[document]), "?")


class InputLabels:
    """The names of the inputs as labels."""

    def __init__(self, lengths: NDArray[np.int32], sizes: Sequence[tuple[str, int, int]]) -> None:
        """`lengths` are the documents' tokens; `sizes` the inputs', in the documents' order."""
        self.sizes = sizes
        names, tokens, _ = zip(*sizes, strict=True)
        self.names = tuple(sorted(set(names)))
        self._codes = np.array([label_code(name) for name in names], dtype=np.int64)
        self._lengths, self._tokens = lengths, tokens

    @cached_property
    def _begins(self) -> NDArray[np.int64]:
        """The first document of each input but the first; it takes a pass over all lengths, which names don't need."""
        return _documents_at(self._lengths, np.cumsum(self._tokens[:-1], dtype=np.int64))

    def codes(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The codes of some documents' labels."""
        return self._codes[np.searchsorted(self._begins, documents, side="right")]


class OneLabel:
    """One label for all documents: the name of a dataset of which no more is known."""

    def __init__(self, name: str, tokens: int = 0, text_bytes: int = 0) -> None:
        self.names: tuple[str, ...] = (name,)
        self.sizes: Sequence[tuple[str, int, int]] = [(name, tokens, text_bytes)]

    def codes(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """The codes of some documents' labels."""
        return np.full(len(documents), label_code(self.names[0]), dtype=np.int64)


def _documents_at(lengths: NDArray[np.int32], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The documents [D] in which the tokens with these numbers, in ascending order, are."""
    found = np.zeros(len(tokens), dtype=np.int64)
    end = 0
    for begin in range(0, len(lengths), BLOCK):
        ends = np.cumsum(lengths[begin : begin + BLOCK], dtype=np.int64) + end
        found += np.searchsorted(ends, tokens, side="right")
        end = int(ends[-1])
    return found


def input_names(paths: Sequence[str]) -> list[str]:
    """Labels for input files: their paths below the folder that all are in; of many files their folders there."""
    parents = [os.path.dirname(path) for path in paths]  # noqa: PTH120
    relative = [Path(os.path.relpath(path, os.path.commonpath(parents))) for path in paths]
    return [path.parts[0] if len(paths) > MAX_FILES else str(path) for path in relative]


def labels_path(prefix: Path | str) -> Path:
    """`<prefix>.labels`."""
    return Path(f"{prefix}.labels")


@cache
def label_code(label: str) -> int:
    """What stands for a label in the file."""
    return crc32(label.encode())


def text_sizes(texts: Iterable[str]) -> NDArray[np.int64]:
    """The bytes [D] of texts in UTF-8."""
    return np.array([len(text) if text.isascii() else len(text.encode()) for text in texts], dtype=np.int64)


def count_labels(
    labels: Iterable[str], lengths: NDArray[np.int32], sizes: NDArray[np.int64], counts: dict[str, list[int]]
) -> NDArray[np.uint32]:
    """The codes [D] of documents' labels; adds documents, tokens [D] and text bytes [D] to the counts of each label."""
    names = [*labels]
    for label, length, size in zip(names, lengths.tolist(), sizes.tolist(), strict=True):
        found = counts.setdefault(label, [0, 0, 0])
        found[0] += 1
        found[1] += length
        found[2] += size
    return np.array([label_code(label) for label in names], dtype=np.uint32)


def add_counts(counts: dict[str, list[int]], more: dict[str, list[int]]) -> None:
    """Add documents, tokens and text bytes of each label. Raises DataError for labels that can't be distinguished."""
    for label, numbers in more.items():
        found = counts.get(label, [0, 0, 0])
        counts[label] = [a + b for a, b in zip(found, numbers, strict=True)]
    check_labels(counts)


def label_record(key: str, checksum: int, counts: dict[str, list[int]]) -> LabelRecord:
    """The record of a .labels file with this CRC-32, of counts that `add_counts` has made."""
    names = sorted(counts)
    text_bytes = {label: counts[label][2] for label in names}
    # Tokens without a byte: one of the records that were joined is of an older version.
    known = all(text_bytes[label] or not counts[label][1] for label in names)
    return LabelRecord(key, checksum, {label: tuple(counts[label][:2]) for label in names}, text_bytes if known else {})


def check_labels(labels: Iterable[str]) -> None:
    """Raises DataError when these labels are too many, or two of them have one code."""
    by_code: dict[int, str] = {}
    for label in labels:
        other = by_code.setdefault(label_code(label), label)
        if other != label:
            raise DataError(
                f"the labels {other!r} and {label!r} have the same CRC-32",
                where="--label-key",
                action="rename one of them",
            )
    if len(by_code) > MAX_LABELS:
        raise DataError(
            f"more than {MAX_LABELS} different labels, such as {', '.join(map(repr, [*by_code.values()][:3]))}",
            where="--label-key",
            needed="a key that says what a document is of, such as its language or source",
        )
