"""Text files: a document is a line, or the whole file. Also what JSON Lines share with them: ranges of whole lines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import xxhash

from pretrainkit.data.readers.records import BadText, Batch, RecordRules, Reject, check_text, invalid_utf8
from pretrainkit.data.readers.source import BLOCK_BYTES, Block, FileRange, RangeCounts, Source
from pretrainkit.errors import DataError

BOM = b"\xef\xbb\xbf"
BATCH_BYTES = 1 << 17
"""Text that is read, parsed and then encoded at once: it stays in a core's cache (8% faster than 4 MiB; down to 128 KiB
there is no difference), and a worker holds little of it: 1 MiB made a process 12 MB larger."""


class LineSource(Source):
    """A record is a line."""

    @abstractmethod
    def parse_lines(self, lines: Iterable[tuple[int, bytes]], rules: RecordRules, batch: Batch) -> None:
        """Add the records of some numbered lines to a batch."""

    def parse(
        self, data: bytes, at_start: bool, rules: RecordRules, batch_bytes: int = 0, first: int = 0
    ) -> Iterator[Batch]:
        data = data.removeprefix(BOM) if at_start else data
        for part in _parts_of_lines(data, batch_bytes) if batch_bytes else [data]:
            lines = part.split(b"\n")
            if not lines[-1]:
                lines.pop()
            batch = Batch([[] for _ in rules.keys], num_lines=first + len(lines), raw=partial(_line, lines, first))
            self.parse_lines(enumerate(lines, first), rules, batch)
            first += len(lines)
            yield batch

    def split(self, number: int, keys: tuple[str, ...]) -> Iterator[FileRange]:
        for piece, begin in enumerate(range(0, self.num_bytes, BLOCK_BYTES)):
            end = min(self.num_bytes, begin + BLOCK_BYTES)
            yield FileRange(number, begin, end, piece, piece + 1, end - begin)

    def read(self, part: FileRange, rules: RecordRules, counts: RangeCounts) -> Iterator[Batch]:
        """A batch at a time: what a worker holds is counted as often as there are workers."""
        hashed, num_lines = xxhash.xxh3_128(), 0
        with Path(self.path).open("rb") as file:
            for begin in range(part.begin, part.end, BATCH_BYTES):
                end = min(begin + BATCH_BYTES, part.end)
                data, nominal = self._lines(file, begin, end)
                hashed.update(nominal)
                del nominal
                counts.num_bytes += len(data)
                for batch in self.parse(data, begin == 0, rules, first=num_lines):
                    num_lines = batch.num_lines
                    yield batch
        counts.digests = [hashed.hexdigest()]

    def blocks(self, part: FileRange, rules: RecordRules, counts: RangeCounts) -> Iterator[Block]:
        with Path(self.path).open("rb") as file:
            data, nominal = self._lines(file, part.begin, part.end)
        counts.digests = [xxhash.xxh3_128_hexdigest(nominal)]
        if data:
            yield Block(data, None, part.num_bytes)

    def _lines(self, file: BinaryIO, begin: int, end: int) -> tuple[bytes, bytes]:
        data, nominal = lines_between(file, begin, end)
        if len(nominal) != end - begin:
            raise DataError(
                "the file became shorter while it was read",
                where=self.path,
                action="run the command again once nothing writes to its input",
            )
        return data, nominal

    def lines_before(self, begin: int) -> int:
        count, last = 0, b"\n"
        with Path(self.path).open("rb", buffering=0) as file:
            while begin and (data := file.read(min(begin, BLOCK_BYTES))):
                count, begin, last = count + data.count(b"\n"), begin - len(data), data[-1:]
        return count + (last != b"\n")  # a line that has begun belongs to the range where it begins


class TextLines(LineSource):
    """A document is a line; blank lines are none."""

    def parse_lines(self, lines: Iterable[tuple[int, bytes]], rules: RecordRules, batch: Batch) -> None:
        for number, line in lines:
            _add_text(number, line, rules, batch)


class TextFile(Source):
    """The whole file is one document."""

    def parse(
        self, data: bytes, at_start: bool, rules: RecordRules, batch_bytes: int = 0, first: int = 0
    ) -> Iterator[Batch]:
        data = data.removeprefix(BOM) if at_start else data
        batch = Batch([[] for _ in rules.keys], num_lines=first + 1, raw=partial(_line, [data], first))
        _add_text(first, data, rules, batch)
        yield batch

    def split(self, number: int, keys: tuple[str, ...]) -> Iterator[FileRange]:
        yield FileRange(number, 0, self.num_bytes, 0, -(-self.num_bytes // BLOCK_BYTES), self.num_bytes)

    def read(self, part: FileRange, rules: RecordRules, counts: RangeCounts) -> Iterator[Batch]:
        for block in self.blocks(part, rules, counts):
            counts.num_bytes = len(block.data)
            yield from self.parse(block.data, True, rules)

    def blocks(self, part: FileRange, rules: RecordRules, counts: RangeCounts) -> Iterator[Block]:
        yield Block(Path(self.path).read_bytes(), None, part.num_bytes)
        counts.digests = self.digests(part)


def _line(lines: list[bytes], first: int, number: int) -> bytes:
    return lines[number - first]


def _add_text(number: int, line: bytes, rules: RecordRules, batch: Batch) -> None:
    if not line.strip():
        batch.num_blank += 1
        return
    try:
        is_replaced = is_repaired = False
        text_bytes = line.removesuffix(b"\r")
        try:
            text = text_bytes.decode()
        except UnicodeDecodeError as error:
            if not rules.replace_bad_characters:
                raise BadText(invalid_utf8(line, error)) from None
            text, is_replaced = text_bytes.decode(errors="replace"), True
        # Nothing else can be wrong with text that was decoded.
        if is_replaced or b"\0" in line or (rules.max_document_bytes and len(line) > rules.max_document_bytes):
            text, is_repaired = check_text("text", text, rules)
    except BadText as bad:
        batch.rejects.append(Reject(number, str(bad), line))
        return
    batch.num_replaced += is_replaced or is_repaired
    for column in batch.texts:
        column.append(text)
    batch.lines.append(number)


def lines_between(file: BinaryIO, begin: int, end: int) -> tuple[bytes, bytes]:
    """The lines of a file whose first byte is in [begin, end), and the bytes of exactly that range."""
    file.seek(max(begin - 1, 0))
    begins_inside = begin > 0 and file.read(1) != b"\n"
    nominal = file.read(end - begin)
    first = nominal.find(b"\n") + 1 if begins_inside else 0
    if begins_inside and not first:  # all of it belongs to a line that began earlier
        return b"", nominal
    tail = b"" if first == len(nominal) or nominal.endswith(b"\n") else file.readline()
    if not (first or tail):
        return nominal, nominal
    # One copy, not two: these may be large.
    return b"".join([memoryview(nominal)[first:], tail]), nominal


def _parts_of_lines(data: bytes, num_bytes: int) -> Iterator[bytes]:
    begin = 0
    while begin < len(data):
        end = data.find(b"\n", begin + num_bytes - 1) + 1 or len(data)
        yield data[begin:end] if end - begin < len(data) else data
        begin = end
    if not data:
        yield data
