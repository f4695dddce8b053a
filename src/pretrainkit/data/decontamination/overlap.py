"""Whether a text has n words in a row with an evaluation set, by hashes of blocks of bytes first.

Case of ASCII letters, white space and ASCII punctuation make no difference. In Japanese, Chinese and Korean two
characters count as a word, as words are about that long there, also in mixed text: 26 of them are 13 words.

Few documents come near an evaluation set, so most are ruled out without a look at their words. The sets' bytes, without
what makes no difference, are hashed by blocks of 32, 16 and 8 at every offset, the documents' at every eighth: L bytes
hold a whole block of B bytes at such an offset if L >= B + 7. Rows of words that are shorter than 15 bytes (letters,
digits) are found by blocks of 8 at every fourth offset. Documents with a known block are looked at word by word.
The tables are files, so that all workers share their memory.
"""

from __future__ import annotations

import atexit
import re
import shutil
import string
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from pretrainkit.data.decontamination.evaluations import Evaluations
from pretrainkit.data.readers.records import Batch, Reject
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
BLOCKS = ((32, 8), (16, 8), (8, 8), (8, 4))
"""Sizes, and distances of the offsets at which documents are hashed, in bytes. The smaller ones are for rows of words
that are too short to hold a larger one."""
BITS_PER_BLOCK = 32
"""Of a table of bits, which rules out all but one in 32 blocks before their hashes are looked for."""
MAX_EXCERPT = 200
OVERLAPS = "overlaps with"
"""Begins what is found about a record."""
_IGNORED = (string.whitespace + string.punctuation).encode()
_LOWER = bytes(range(256)).lower()
_SPACED = bytes(ord(" ") if byte in _IGNORED else byte for byte in _LOWER)
_CHARACTERS = (
    r"\u1100-\u11ff\u3000-\u30ff\u3130-\u318f\u31f0-\u31ff\u3400-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff"
    r"\uff00-\uffef\U00020000-\U0003ffff"
)
"""Of Japanese, Chinese and Korean, their punctuation included."""
_UNITS = re.compile(rf"[{_CHARACTERS}]|[^{_CHARACTERS} ]+")
_IS_CHARACTER = re.compile(rf"[{_CHARACTERS}]")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Overlap:
    """Words that a text has in common with evaluation sets."""

    names: tuple[str, ...]
    """Of the sets."""
    words: str


@dataclass(frozen=True)
class _Row:
    """As few words as weigh enough: their text, and their place in the bytes of their text that count."""

    words: str
    begin: int
    end: int


def _rows(text: str, num_words: int) -> Iterator[_Row]:
    """The shortest row of words that weighs `num_words` or more, from every word on that has one."""
    units = _UNITS.findall(text.encode(errors="replace").translate(_SPACED).decode())
    weights = [1 if _IS_CHARACTER.match(unit) else 2 for unit in units]
    ends = [0]
    for unit in units:
        ends.append(ends[-1] + len(unit.encode()))
    last, weight = 0, 0
    for first in range(len(units)):
        while weight < 2 * num_words and last < len(units):
            weight += weights[last]
            last += 1
        if weight < 2 * num_words:
            return
        yield _Row(" ".join(units[first:last]), ends[first], ends[last])
        weight -= weights[first]


def _counting_bytes(text: str) -> bytes:
    """The bytes that make a difference."""
    return text.encode(errors="replace").translate(_LOWER, _IGNORED)


def _block_hashes(words: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """Hashes [W - size / 8 + 1] of the blocks of `size` bytes that begin with each of the words [W] of 8 bytes."""
    count = size // 8
    hashes = words[: len(words) - count + 1] * _FACTOR
    for place in range(1, count):
        hashes += words[place : len(words) - count + 1 + place]
        hashes *= _FACTOR
    return hashes


def _words_of(data: bytes, offset: int = 0) -> NDArray[np.uint64]:
    return np.frombuffer(data, np.uint64, max(0, len(data) - offset) // 8, offset)


@dataclass
class _Table:
    """A set of hashes of blocks, as bits."""

    size: int
    stride: int
    hashes: list[NDArray[np.uint64]] = field(default_factory=list)

    def add(self, data: bytes) -> None:
        """Add the blocks at all offsets of some bytes."""
        for offset in range(min(8, len(data) - self.size + 1)):
            self.hashes.append(_block_hashes(_words_of(data, offset), self.size))

    def save(self, folder: Path) -> None:
        """Write the hashes in order, and a power of two of bits, of which bit `hash >> shift` is 1 for each of them."""
        hashes = np.unique(np.concatenate(self.hashes))
        num_bits = max(16, (BITS_PER_BLOCK * len(hashes) - 1).bit_length())
        places = np.unique(hashes >> np.uint64(64 - num_bits)).astype(np.int64)
        bits = np.zeros(1 << (num_bits - 3), np.uint8)
        np.bitwise_or.at(bits, places >> 3, np.left_shift(1, places & 7).astype(np.uint8))
        np.save(folder / f"{self.size}_{self.stride}.hashes.npy", hashes)
        np.save(folder / f"{self.size}_{self.stride}.bits.npy", bits)


@dataclass(frozen=True)
class OverlapIndex:
    """The tables of evaluation sets, in files."""

    folder: Path
    names: tuple[str, ...]
    num_words: int
    is_dropped: bool
    """Whether a record that overlaps is left out."""
    short: tuple[bytes, ...]
    """The bytes of rows of words too short for any block, of fewer than 11 words: searched for one by one."""


def build_index(evaluations: Evaluations) -> OverlapIndex:
    """The index of some sets, in a temporary folder that the process removes at its end. Raises RequestError."""
    tables, num_words = [_Table(size, stride) for size, stride in BLOCKS], evaluations.num_words
    rows, short, num_texts, num_unseen = set[tuple[int, int]](), set[bytes](), 0, 0
    for number, text in evaluations.texts():
        data, has_rows, is_added = _counting_bytes(text), False, False
        for row in _rows(text, num_words):
            has_rows = True
            rows.add((xxhash.xxh3_64_intdigest(row.words.encode()), number))
            length = row.end - row.begin
            table = next((table for table in tables if length >= table.size + table.stride - 1), None)
            if table is None:
                short.add(data[row.begin : row.end])
            elif table is not tables[0]:
                table.add(data[row.begin : row.end])
            elif not is_added:
                is_added = True
                table.add(data)
        num_texts, num_unseen = num_texts + 1, num_unseen + (not has_rows)
    folder = Path(tempfile.mkdtemp(prefix="pretrainkit-evaluations-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for table in tables:
        if table.hashes:
            table.save(folder)
    ordered = sorted(rows)
    np.save(folder / "rows.npy", np.array([row for row, _ in ordered], np.uint64))
    np.save(folder / "sets.npy", np.array([number for _, number in ordered], np.uint32))
    LOGGER.info("%d texts of %d evaluation sets, %d rows of words", num_texts, len(evaluations.names), len(ordered))
    if num_unseen:
        LOGGER.warning("%d texts of evaluation sets have less than %d words: not looked for", num_unseen, num_words)
    return OverlapIndex(folder, tuple(evaluations.names), num_words, evaluations.is_dropped, tuple(sorted(short)))


@dataclass(frozen=True)
class Decontaminated:
    """A batch after a look for overlaps."""

    batch: Batch
    """Without the records that overlap, if those are left out."""
    found: list[Reject] = field(default_factory=list)
    """Records that overlap, left out or kept."""
    overlaps: Counter[str] = field(default_factory=Counter)
    """Records by the set that they overlap with."""
    num_left_out: int = 0


class OverlapFinder:
    """Finds texts that overlap with evaluation sets."""

    def __init__(self, index: OverlapIndex) -> None:
        self._index = index

        def array(name: str) -> NDArray:
            return np.asarray(np.load(index.folder / f"{name}.npy", mmap_mode="r"))

        names = {block: "{}_{}".format(*block) for block in BLOCKS}
        self._tables = {
            block: (array(f"{name}.bits"), array(f"{name}.hashes"))
            for block, name in names.items()
            if (index.folder / f"{name}.bits.npy").is_file()
        }
        self._rows, self._sets = array("rows"), array("sets")

    def decontaminate(self, batch: Batch) -> Decontaminated:
        """Look for overlaps in all texts of a batch's records."""
        found: dict[int, list[Overlap]] = {}
        for texts in batch.texts:
            for place, overlap in self.find(texts).items():
                found.setdefault(place, []).append(overlap)
        result = Decontaminated(batch)
        for place, overlaps in sorted(found.items()):
            names, line = sorted({name for overlap in overlaps for name in overlap.names}), batch.lines[place]
            result.overlaps.update(names)
            reason = f"{OVERLAPS} {', '.join(names)}: {overlaps[0].words}"
            result.found.append(Reject(line, reason, batch.raw(line), is_kept=not self._index.is_dropped))
        if not found or not self._index.is_dropped:
            return result
        return replace(result, batch=batch.without({*found}), num_left_out=len(found))

    def find(self, texts: list[str]) -> dict[int, Overlap]:
        """The first overlap of each text that has any, by the text's place."""
        if not texts:
            return {}
        data = b"\0".join([text.encode() for text in texts]).translate(_LOWER, _IGNORED)  # texts hold no NUL
        places = []
        for (size, stride), (bits, known) in self._tables.items():
            for offset in range(0, 8, stride):
                if len(words := _words_of(data, offset)) >= size // 8:
                    places.append(offset + 8 * _known_places(_block_hashes(words, size), bits, known))
        places += [_places_of(short, data) for short in self._index.short]
        hits = np.concatenate(places) if places else np.zeros(0, np.int64)
        if not hits.size:
            return {}
        bounds = np.flatnonzero(np.frombuffer(data, np.uint8) == 0)
        hits = np.unique(hits)
        numbers = np.searchsorted(bounds, hits)
        found = {}
        for number in np.unique(numbers).tolist():
            begin = bounds[number - 1] + 1 if number else 0
            if overlap := self._first_overlap(texts[number], hits[numbers == number] - begin):
                found[number] = overlap
        return found

    def _first_overlap(self, text: str, hits: NDArray[np.int64]) -> Overlap | None:
        """The first row of words in common, in the words around some places in the bytes of a text that count."""
        words = text.encode().translate(_SPACED).split()
        ends = np.cumsum(np.fromiter(map(len, words), np.int64, len(words)))
        reach, seen = 2 * self._index.num_words, -1
        for hit in hits.tolist():
            if hit < seen:
                continue  # in the words around an earlier place
            place = int(np.searchsorted(ends, hit, side="right"))
            around = words[max(0, place - reach) : place + reach + 1]
            if overlap := self._overlap_in(b" ".join(around).decode()):
                return overlap
            seen = ends[place]
        return None

    def _overlap_in(self, text: str) -> Overlap | None:
        rows = [row.words for row in _rows(text, self._index.num_words)]
        hashes = np.array([xxhash.xxh3_64_intdigest(words.encode()) for words in rows], np.uint64)
        begins, ends = (np.searchsorted(self._rows, hashes, side) for side in ("left", "right"))
        known = np.flatnonzero(ends > begins)
        if not known.size:
            return None
        place = known[0]
        names = (self._index.names[number] for number in self._sets[begins[place] : ends[place]])
        return Overlap(tuple(names), rows[place][:MAX_EXCERPT])


def _known_places(hashes: NDArray[np.uint64], bits: NDArray[np.uint8], known: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The places of the hashes that are known."""
    num_bits = 3 + (len(bits).bit_length() - 1)
    places = (hashes >> np.uint64(64 - num_bits)).view(np.int64)
    maybe = np.flatnonzero((bits[places >> 3] >> (places & 7).astype(np.uint8)) & 1)
    found = np.searchsorted(known, hashes[maybe])
    return maybe[known[np.minimum(found, len(known) - 1)] == hashes[maybe]]


def _places_of(needle: bytes, data: bytes) -> NDArray[np.int64]:
    return np.array([match.start() for match in re.finditer(re.escape(needle), data)], np.int64)
