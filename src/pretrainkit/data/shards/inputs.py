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
from pretrainkit.data.shards.task import ShardBlock


@dataclass
class _SourcePart:
    """What was read of a source: all of its ranges in this shard."""

    first_range: FileRange
    first_line: int
    """Number of its first line within the shard."""
    num_bytes: int = 0
    num_lines: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)
    lines_before: int | None = None
    """Lines of the source that belong to earlier shards, once they are counted."""


class ShardReader:
    """Reads a shard's work items once."""

    def __init__(self, sources: list[Source], items: list[WorkItem], rules: RecordRules) -> None:
        self._sources, self._rules = sources, rules
        self._ranges = [part for item in items for part in item.ranges]
        self._parts: dict[int, _SourcePart] = {}
        self.total_bytes = sum(part.num_bytes for part in self._ranges)
        """Size on disk."""

    def inputs(self) -> tuple[ShardInput, ...]:
        """What was read, once all blocks were taken."""
        found = ((self._sources[number], part) for number, part in self._parts.items())
        return tuple(
            ShardInput(source.path, source.num_bytes, source.modified_ns, part.num_bytes, part.digest.hexdigest())
            for source, part in found
        )

    def blocks(self, key_prefix: str) -> Iterator[ShardBlock]:
        """The records, block by block. Raises DataError for a damaged file."""
        num_lines = 0
        for found in self._ranges:
            source, counts = self._sources[found.source], RangeCounts(found.source)
            part = self._parts.setdefault(found.source, _SourcePart(found, num_lines))
            for block in source.blocks(found, self._rules, counts):
                yield ShardBlock(
                    content=block,
                    source=source,
                    number=found.source,
                    key_prefix=key_prefix,
                    first_line=part.first_line + part.num_lines,
                    first_line_in_source=part.num_lines,
                    at_start=found.begin == 0 and part.num_bytes == 0,
                )
                num_lines += block.num_lines
                part.num_lines += block.num_lines
                part.num_bytes += len(block.data) or block.disk_bytes
            part.digest.update("".join(counts.digests).encode())

    def line_number(self, block: ShardBlock, line: int) -> int:
        """The number in its file, counted from 1, of a line that is counted from the shard's part of the file."""
        part = self._parts[block.number]
        if part.lines_before is None:  # counting them reads the file up to there
            part.lines_before = block.source.lines_before(part.first_range.begin)
        return part.lines_before + line + 1
