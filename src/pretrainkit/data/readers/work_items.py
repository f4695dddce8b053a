"""How inputs are cut into pieces of work. The cut depends on the inputs alone, never on the number of workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from pretrainkit.data.readers.records import Batch, RecordRules
from pretrainkit.data.readers.source import BLOCK_BYTES, FileRange, RangeCounts, Source

COMPRESSION_RATIO = 4
"""Assumed text per compressed byte, to weigh streams against plain files when work is split over jobs."""
MAX_RANGES = 256
"""Files in an item: a worker holds the counts of each."""
SAMPLE_BATCHES, SAMPLE_BATCH_BYTES = 4, 1 << 17


@dataclass(frozen=True)
class WorkItem:
    """Ranges of one output that a worker reads and encodes; or a stream, which is handed out block by block."""

    output: int
    ranges: tuple[FileRange, ...]
    is_stream: bool

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return sum(part.num_bytes for part in self.ranges)

    @property
    def weight(self) -> int:
        """Estimated bytes of text."""
        return self.num_bytes * (COMPRESSION_RATIO if self.is_stream else 1)


def cut(sources: list[Source], outputs: list[int], keys: tuple[str, ...]) -> list[WorkItem]:
    """The work items of all sources in order; `outputs` gives the output that each source goes to.

    Small files of one output share an item. Raises RequestError for a table without a wanted column.
    """
    items: list[WorkItem] = []
    group: list[FileRange] = []

    def close() -> None:
        if group:
            items.append(WorkItem(outputs[group[0].source], tuple(group), is_stream=False))
            group.clear()

    for number, source in enumerate(sources):
        if source.is_stream or (group and outputs[group[0].source] != outputs[number]):
            close()
        for part in source.split(number, keys):
            if source.is_stream:
                items.append(WorkItem(outputs[number], (part,), is_stream=True))
                continue
            if sum(other.num_bytes for other in group) + part.num_bytes > BLOCK_BYTES or len(group) == MAX_RANGES:
                close()
            group.append(part)
    close()
    return items


def shard(items: list[WorkItem], index: int, count: int) -> tuple[int, int]:
    """The range of items of one job of an array: contiguous, so that joining the jobs' outputs in order gives all.

    Every item belongs to exactly one job; sizes are as even as the items allow.
    """
    total = sum(item.weight for item in items)
    bounds, done, position = [0], 0, 0
    for part in range(1, count):
        goal = total * part / count
        while position < len(items) and done + items[position].weight / 2 <= goal:
            done += items[position].weight
            position += 1
        bounds.append(position)
    bounds.append(len(items))
    return bounds[index], bounds[index + 1]


def fingerprint(items: list[WorkItem]) -> str:
    """Equal for two tasks of an array that have cut the same input equally; otherwise records are lost or doubled."""
    cuts = [(part.source, part.begin, part.end) for item in items for part in item.ranges]
    weights = [item.weight for item in items]
    return hashlib.sha256(repr((cuts, weights)).encode()).hexdigest()


def sample_texts(sources: list[Source], item: WorkItem, rules: RecordRules, num_bytes: int) -> Iterator[str]:
    """About so many bytes of text from the beginning of an item."""
    for batch in islice(_first_batches(sources, item, rules), SAMPLE_BATCHES):
        for texts in zip(*batch.texts, strict=True):
            for text in texts:
                yield text[:num_bytes]
                num_bytes -= len(text.encode())
                if num_bytes <= 0:
                    return


def _first_batches(sources: list[Source], item: WorkItem, rules: RecordRules) -> Iterator[Batch]:
    for part in item.ranges:
        source, counts = sources[part.source], RangeCounts(part.source)
        if item.is_stream:
            for block in source.blocks(part, rules, counts):
                yield from source.parse(block.data, True, rules, SAMPLE_BATCH_BYTES)
        else:
            yield from source.read(part, rules, counts)
