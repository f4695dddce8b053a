"""A shard's input in blocks: one process reads them in order, workers turn each into encoded members of the tar."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from pretrainkit.data.decontamination.overlap import Decontaminated, OverlapFinder, OverlapIndex
from pretrainkit.data.readers.records import Batch, RecordRules, Reject
from pretrainkit.data.readers.source import Block, RangeCounts, Source
from pretrainkit.data.readers.work_items import WorkItem
from pretrainkit.data.shards.format import SAMPLE, ShardInput, pack_samples
from pretrainkit.data.tokens.encoder import Encoder, finish
from pretrainkit.data.tokens.spelled import SpelledTokens
from pretrainkit.errors import DataError

BATCH_BYTES = 1 << 19
"""Text that is parsed, encoded and packed at once: it stays in a core's cache, and the vocabulary's tables are brought
there less often than for a quarter as much (14% faster)."""
MAX_TOKENS = (1 << 31) // 12
"""Of a sample: the largest ids take 12 bytes each as JSON, and a table of samples has 31 bits for their size."""


@dataclass(frozen=True)
class ShardBlock:
    """Records of one source, and their place in the shard."""

    content: Block
    source: Source
    part_begin: int
    """Where the shard's part of the source begins."""
    key_prefix: str
    first_line: int
    """Number of its first line within the shard."""
    first_line_in_part: int
    """The same within the shard's part of its source."""
    at_start: bool
    """Whether the block begins where its source does."""

    def line_number(self, line: int) -> int:
        """The number in its file, counted from 1, of a line of this block."""
        return _lines_before(self.source, self.part_begin) + self.first_line_in_part + line + 1


@lru_cache(maxsize=1)
def _lines_before(source: Source, begin: int) -> int:
    """Lines of a source that belong to earlier shards; counting them reads the file up to there."""
    return source.lines_before(begin)


@dataclass
class Piece:
    """A block's samples."""

    members: list[bytes] = field(default_factory=list)
    """Of the tar, to be joined."""
    samples: list[NDArray[Any]] = field(default_factory=list)
    """Tables of dtype SAMPLE, to be joined; offsets are counted from the first member."""
    rejects: list[Reject] = field(default_factory=list)
    """Their lines are counted in the block."""
    contaminated: list[Reject] = field(default_factory=list)
    overlaps: Counter[str] = field(default_factory=Counter)
    """Records by the evaluation set that they overlap with."""
    counts: Counter[str] = field(default_factory=Counter)
    """By the field of the shard's record."""


@dataclass(frozen=True)
class ShardTask:
    """The task of an EncodePool's workers, for all blocks of all shards."""

    first_ids: tuple[int, ...]
    """Put before every sample."""
    last_ids: tuple[int, ...]
    num_ids: int
    ids_format: str
    has_text: bool
    rules: RecordRules
    special_tokens: tuple[str, ...] = ()
    overlaps: OverlapIndex | None = None
    """With the evaluation sets, where samples must not overlap with any."""

    def open(self, encoder: Encoder, _: int) -> Callable[[ShardBlock], Piece]:
        """The function that encodes a block. It raises DataError for an id that the tokenizer doesn't announce."""
        finder = OverlapFinder(self.overlaps) if self.overlaps else None
        return partial(self._encode, encoder, SpelledTokens(self.special_tokens), finder)

    def _encode(
        self, encoder: Encoder, spelled: SpelledTokens, finder: OverlapFinder | None, block: ShardBlock
    ) -> Piece:
        piece = Piece()
        batches: Iterable[Batch]
        if block.content.batch is not None:
            batches = [block.content.batch]
        else:
            batches = block.source.parse(block.content.data, block.at_start, self.rules, BATCH_BYTES)
        for whole in batches:
            piece.rejects += whole.rejects
            looked_at = finder.decontaminate(whole) if finder else Decontaminated(whole)
            batch = looked_at.batch
            piece.contaminated += looked_at.found
            piece.overlaps.update(looked_at.overlaps)
            piece.counts.update(
                num_records=len(whole.lines) + len(whole.rejects),
                num_contaminated=looked_at.num_left_out,
                num_blank_lines=batch.num_blank,
                num_replaced=batch.num_replaced,
                num_spelled=spelled.count(batch.texts[0]),
            )
            if batch.lines:
                self._pack(encoder, batch, block, piece)
        piece.counts["num_rejected"] = len(piece.rejects)
        return piece

    def _pack(self, encoder: Encoder, batch: Batch, block: ShardBlock, piece: Piece) -> None:
        """Add a batch's samples to a piece."""
        texts = batch.texts[0]
        ids, offsets = encoder.encode(texts)
        if ids.size and int(ids.max()) >= self.num_ids:
            raise DataError(f"token id {int(ids.max())}, but the tokenizer has ids up to {self.num_ids - 1}")
        num_added = len(self.first_ids) + len(self.last_ids)
        lengths = np.diff(offsets)
        is_long = lengths > MAX_TOKENS - num_added
        for number in np.flatnonzero(is_long):
            found = f"{lengths[number]} tokens are more than the {MAX_TOKENS} that a sample may have"
            piece.rejects.append(Reject(batch.lines[number], found, texts[number].encode()))
        if is_long.any():
            ids = ids[np.repeat(~is_long, lengths)]
        kept = np.flatnonzero((lengths > 0) & ~is_long)
        all_ids, num_tokens = finish(ids, lengths[kept], np.dtype(np.int32), first=self.first_ids, last=self.last_ids)
        bounds = itertools.pairwise([0, *np.cumsum(num_tokens).tolist()])
        samples = [all_ids[begin:end] for begin, end in bounds]
        lines = np.array(batch.lines, np.int64)[kept] + block.first_line
        encoded = [texts[number].encode() for number in kept]
        members, places, sizes, checksums = pack_samples(
            block.key_prefix, lines, samples, encoded if self.has_text else None, self.ids_format
        )
        table = np.empty(len(kept), SAMPLE)
        table["offset"] = places + sum(map(len, piece.members))
        table["num_bytes"], table["num_tokens"], table["crc32"] = sizes, num_tokens, checksums
        piece.members.append(members)
        piece.samples.append(table)
        piece.counts.update(
            num_samples=len(table),
            num_tokens=int(num_tokens.sum(dtype=np.int64)),
            num_empty=int(np.count_nonzero(lengths == 0)),
            num_text_bytes=sum(map(len, encoded)),
        )


class InputReader:
    """Reads a shard's work items once, counts their lines and hashes their bytes."""

    def __init__(self, sources: list[Source], items: list[WorkItem], rules: RecordRules) -> None:
        self._sources, self._rules = sources, rules
        self._ranges = [part for item in items for part in item.ranges]
        self.total_bytes = sum(part.num_bytes for part in self._ranges)
        """Size on disk."""
        self.inputs: list[ShardInput] = []
        """What was read, by file."""

    def blocks(self, key_prefix: str) -> Iterator[ShardBlock]:
        """The records, block by block. Raises DataError for a damaged file."""
        num_lines = 0
        for number, group in itertools.groupby(self._ranges, key=lambda part: part.source):
            ranges = list(group)
            source, digest, num_bytes, first_line = self._sources[number], xxhash.xxh3_128(), 0, num_lines
            for part in ranges:
                counts = RangeCounts(number)
                for block in source.blocks(part, self._rules, counts):
                    yield ShardBlock(
                        content=block,
                        source=source,
                        part_begin=ranges[0].begin,
                        key_prefix=key_prefix,
                        first_line=num_lines,
                        first_line_in_part=num_lines - first_line,
                        at_start=part.begin == 0 and num_bytes == 0,
                    )
                    num_lines += block.num_lines
                    num_bytes += len(block.data) or block.disk_bytes
                digest.update("".join(counts.digests).encode())
            state = source.path, source.num_bytes, source.modified_ns
            self.inputs.append(ShardInput(*state, num_bytes, digest.hexdigest()))
