"""The input of one shard, read in order and in blocks, with its lines counted and its bytes hashed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash

from pretrainkit.data.readers.records import RecordRules
from pretrainkit.data.readers.source import FileRange, RangeCounts, Source
from pretrainkit.data.readers.work_items import WorkItem
from pretrainkit.data.shards.format import ShardInput
from pretrainkit.data.shards.task import Block


@dataclass
class _Read:
    """What was read of a source."""

    first_span: FileRange
    num_bytes: int = 0
    num_lines: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)


class ShardReader:
    """Reads a shard's units once."""

    def __init__(self, sources: list[Source], units: list[WorkItem], rules: RecordRules) -> None:
        self._sources, self._units, self._rules = sources, units, rules
        self._read: dict[int, _Read] = {}
        self.total_bytes = sum(span.num_bytes for unit in units for span in unit.ranges)
        """On disk."""

    def inputs(self) -> tuple[ShardInput, ...]:
        """What was read, once all blocks were taken."""
        found = ((self._sources[number], read) for number, read in self._read.items())
        return tuple(
            ShardInput(source.path, source.num_bytes, source.modified_ns, read.num_bytes, read.digest.hexdigest())
            for source, read in found
        )

    def blocks(self, key_prefix: str) -> Iterator[Block]:
        """The records, block by block. Raises DataError for a damaged file."""
        begin = 0  # line of the shard that the source's part begins with
        for unit in self._units:
            for span in unit.ranges:
                read = self._read.get(span.source)
                if read is None:
                    begin += sum(other.num_lines for other in [*self._read.values()][-1:])
                    read = self._read[span.source] = _Read(span)
                source = self._sources[span.source]
                counts = RangeCounts(span.source)
                for block in source.blocks(span, self._rules, counts):
                    first_line = read.num_lines
                    yield Block(
                        source=span.source,
                        key_prefix=key_prefix,
                        first_line=begin + first_line,
                        first_line_in_source=first_line,
                        at_start=span.begin == 0 and read.num_bytes == 0,
                        format_of=source,
                        data=block.data,
                        batch=block.batch,
                        disk_bytes=block.disk_bytes,
                    )
                    read.num_lines += block.num_lines
                    read.num_bytes += len(block.data) or block.disk_bytes
                read.digest.update("".join(counts.digests).encode())

    def lines_before(self, number: int) -> int:
        """Lines, or rows, of a source that belong to earlier shards."""
        return self._sources[number].lines_before(self._read[number].first_span.begin)
