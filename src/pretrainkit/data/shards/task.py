"""What workers do for token shards: turn a block of records into encoded members of the tar."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pretrainkit.data.readers.records import Batch, RecordRules, Reject
from pretrainkit.data.readers.source import Block, Source
from pretrainkit.data.shards.format import pack_samples
from pretrainkit.data.tokens.encoder import Encoder
from pretrainkit.errors import DataError

BATCH_BYTES = 1 << 19
"""Text that is parsed, encoded and packed at once: it stays in a core's cache, and the vocabulary's tables are brought
there less often than for a quarter as much (14% faster)."""


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

    def open(self, encoder: Encoder, _: int) -> Callable[[ShardBlock], Piece]:
        """The function that encodes a block. It raises DataError for an id that the tokenizer doesn't announce."""
        return _BlockEncoder(self, encoder).encode


@dataclass(frozen=True)
class ShardBlock:
    """Records of one source, and their place in the shard."""

    content: Block
    source: Source
    number: int
    """Position of the source in the list of sources."""
    key_prefix: str
    first_line: int
    """Number of its first line within the shard."""
    first_line_in_source: int
    """The same within the shard's part of its source."""
    at_start: bool
    """Whether the block begins where its source does."""


@dataclass
class Piece:
    """A block's samples."""

    members: list[bytes] = field(default_factory=list)
    """Of the tar, to be joined."""
    offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    num_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    num_records: int = 0
    num_empty: int = 0
    num_blank_lines: int = 0
    num_replaced: int = 0
    num_text_bytes: int = 0
    lines: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of the samples, in the shard's part of their source."""
    rejects: list[Reject] = field(default_factory=list)


class _BlockEncoder:
    def __init__(self, task: ShardTask, encoder: Encoder) -> None:
        self.task, self.encoder = task, encoder

    def encode(self, block: ShardBlock) -> Piece:
        """Parse, encode and pack."""
        piece = Piece()
        tables: list[NDArray[np.int64]] = []
        batches: Iterable[Batch]
        if block.content.batch is not None:
            batches = [block.content.batch]
        else:
            batches = block.source.parse(block.content.data, block.at_start, self.task.rules, BATCH_BYTES)
        for batch in batches:
            # Lines are counted in the block here, in the shard's part of the source in the piece.
            rejects = [replace(bad, line=bad.line + block.first_line_in_source) for bad in batch.rejects]
            piece.num_records += len(batch.lines) + len(rejects)
            piece.num_blank_lines += batch.num_blank
            piece.num_replaced += batch.num_replaced
            piece.rejects += rejects
            if batch.lines:
                tables.append(self._pack(batch, block, piece))
        if tables:
            piece.offsets, piece.sizes, piece.num_tokens, piece.lines = np.concatenate(tables, axis=1)
        return piece

    def _pack(self, batch: Batch, block: ShardBlock, piece: Piece) -> NDArray[np.int64]:
        """Add a batch's samples to a piece; gives their offsets in it, sizes, numbers of tokens and lines."""
        task, texts = self.task, batch.texts[0]
        ids, offsets = self.encoder.encode(texts)
        if ids.size and int(ids.max()) >= task.num_ids:
            raise DataError(f"token id {int(ids.max())}, but the tokenizer has ids up to {task.num_ids - 1}")
        lengths = np.diff(offsets)
        kept = np.flatnonzero(lengths)
        piece.num_empty += len(texts) - len(kept)
        samples = self._samples(ids, offsets, kept)
        lines = np.array(batch.lines, np.int64)[kept] + block.first_line
        encoded = [texts[number].encode() for number in kept]
        piece.num_text_bytes += sum(map(len, encoded))
        before = sum(map(len, piece.members))
        members, places, sizes = pack_samples(
            block.key_prefix, lines, samples, encoded if task.has_text else None, task.ids_format
        )
        piece.members.append(members)
        num_tokens = lengths[kept] + len(task.first_ids) + len(task.last_ids)
        return np.stack([places + before, sizes, num_tokens, lines - block.first_line + block.first_line_in_source])

    def _samples(
        self, ids: NDArray[np.uint32], offsets: NDArray[np.int64], kept: NDArray[np.int64]
    ) -> list[NDArray[np.int32]]:
        first, last = self.task.first_ids, self.task.last_ids
        lengths = np.diff(offsets)[kept]
        all_ids = np.empty(len(ids) + (len(first) + len(last)) * len(kept), np.int32)
        is_text = np.ones(len(all_ids), bool)
        ends = np.cumsum(lengths + len(first) + len(last))
        begins = ends - lengths - len(first) - len(last)
        for places, values in ((begins, first), (ends - len(last), last)):
            for position, value in enumerate(values):
                all_ids[places + position] = value
                is_text[places + position] = False
        all_ids[is_text] = ids.view(np.int32)
        return [all_ids[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
