"""What a worker of preprocessing does: reads and encodes pieces of the input, and writes their tokens.

A chunk's place in the output is known once all earlier ones are encoded. Until then its worker holds it in memory and
writes it there on request; a worker that would hold too much writes part files instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrainkit.data.indexed.crc import crc32
from pretrainkit.data.indexed.encoded_chunk import EncodedChunk, KeyCounts, Order, OutputOffset
from pretrainkit.data.indexed.file_bytes import opened, write_at
from pretrainkit.data.indexed.part_file import REJECTS, PartWriter
from pretrainkit.data.readers.records import Batch, RecordRules, Reject
from pretrainkit.data.readers.source import RangeCounts, Source
from pretrainkit.data.readers.text import BATCH_BYTES
from pretrainkit.data.readers.work_items import WorkItem
from pretrainkit.data.tokens.encoder import Encoder, finish, trim_heap
from pretrainkit.errors import DataError

MAX_HELD_CHUNKS = 3
"""Chunks that a worker holds in memory while their place is not known."""
MAX_HELD_BYTES = 48 << 20
"""Tokens of a chunk above which they go to a part file while it is encoded."""
CHUNKS_PER_TRIM = 8
"""Free pages in the heap are given back after so many chunks: 11 MB a worker, for about 1% of its time."""


@dataclass(frozen=True)
class ItemRequest:
    """Read and encode a work item."""

    number: int
    item: WorkItem


@dataclass(frozen=True)
class BlockRequest:
    """Encode a block of a stream."""

    number: int
    """Of the work item."""
    block: int
    source: int
    data: bytes
    disk_bytes: int
    digests: tuple[str, ...] = ()
    """Of the complete stream, with its last block, which is empty."""
    is_last: bool = False


@dataclass(frozen=True)
class PlaceRequest:
    """Write a chunk that is held to its place."""

    order: Order
    files: list[tuple[Path, Path]]
    """Per key: .bin and .idx."""
    offsets: list[OutputOffset]


@dataclass(frozen=True)
class EncodeReply:
    """A chunk, and the earlier one that its worker has put into a part file instead of holding more."""

    chunk: EncodedChunk
    spilled: Order | None


@dataclass(frozen=True)
class IndexedTask:
    """All that a worker needs to know. Its items are the requests above."""

    sources: list[Source]
    folder: Path
    special_tokens: dict[str, int]
    special_tokens_in_text: str
    num_ids: int
    rules: RecordRules
    stop_on_bad_record: bool
    dtype: str
    bos_id: int | None
    eod_id: int | None

    def open(self, encoder: Encoder, worker: int) -> Callable[[Any], EncodeReply | bool]:
        """The worker's function: an EncodeReply; or for a PlaceRequest whether the chunk was still held."""
        state = _Worker(self, encoder, worker)
        return lambda request: state.place(request) if isinstance(request, PlaceRequest) else state.encode(request)


class _HeldChunk:
    """An encoded chunk in memory, or on its way to a part file."""

    def __init__(self, chunk: EncodedChunk, folder: Path) -> None:
        self.chunk, self._folder = chunk, folder
        self._part: PartWriter | None = None
        self._clear()

    def _clear(self) -> None:
        self.ids: list[list[NDArray]] = [[] for _ in self.chunk.keys]
        self.lengths: list[list[NDArray[np.int32]]] = [[] for _ in self.chunk.keys]
        self._num_bytes = 0

    def add(self, k: int, ids: NDArray, lengths: NDArray[np.int32]) -> None:
        """Add a key's documents [ids, lengths]."""
        key = self.chunk.keys[k]
        self.ids[k].append(ids)
        self.lengths[k].append(lengths)
        self._num_bytes += ids.nbytes
        key.num_documents += len(lengths)
        key.num_tokens += len(ids)
        key.tokens_bytes += ids.nbytes
        key.tokens_crc32 = crc32(ids, key.tokens_crc32)
        key.lengths_crc32 = crc32(lengths, key.lengths_crc32)
        if self._num_bytes > MAX_HELD_BYTES:
            self._write_to_part()

    def _write_to_part(self) -> PartWriter:
        self._part = self._part or PartWriter(self._folder, self.chunk.order, len(self.chunk.keys))
        for k, (ids, lengths) in enumerate(zip(self.ids, self.lengths, strict=True)):
            self._part.append(2 * k, ids)
            self._part.append(2 * k + 1, lengths)
        self._clear()
        return self._part

    def finish(self, rejects: bytes) -> bool:
        """All of the chunk is added; whether it is held, and not in a part file."""
        if self._part is None and not rejects:
            return True
        self.spill(rejects)
        return False

    def spill(self, rejects: bytes = b"") -> None:
        """Write the part file."""
        self.chunk.worker, self.chunk.has_rejects = None, bool(rejects)
        part = self._write_to_part()
        part.append(REJECTS, [rejects])
        part.finish(self.chunk)


class _Worker:
    def __init__(self, task: IndexedTask, encoder: Encoder, number: int) -> None:
        self._task, self._encoder, self._number = task, encoder, number
        self._dtype = np.dtype(task.dtype)
        self._held: dict[Order, _HeldChunk] = {}
        self._num_encoded = 0
        self._is_special = np.zeros(task.num_ids, dtype=bool)
        self._is_special[list(task.special_tokens.values())] = True

    def place(self, request: PlaceRequest) -> bool:
        """Write a held chunk to its place; False if it is in a part file by now."""
        held = self._held.pop(request.order, None)
        if held is None:
            return False
        for k, ((tokens, lengths), offset) in enumerate(zip(request.files, request.offsets, strict=True)):
            for path, begin, arrays in (
                (tokens, offset.tokens, held.ids[k]),
                (lengths, offset.lengths, held.lengths[k]),
            ):
                with opened(path, os.O_WRONLY) as descriptor:
                    for array in arrays:
                        begin = write_at(descriptor, begin, array)
        return True

    def encode(self, request: ItemRequest | BlockRequest) -> EncodeReply:
        """Read and encode."""
        task = self._task
        if isinstance(request, BlockRequest):
            counts = RangeCounts(request.source, num_bytes=len(request.data), digests=[*request.digests])
            parse = task.sources[request.source].parse
            batches = parse(request.data, request.block == 0, task.rules, BATCH_BYTES) if request.data else iter(())
            ranges = [(counts, batches)]
            chunk = self._chunk(request.number, request.block, request.is_last, request.disk_bytes)
        else:
            ranges = []
            for part in request.item.ranges:
                counts = RangeCounts(part.source)
                ranges.append((counts, task.sources[part.source].read(part, task.rules, counts)))
            chunk = self._chunk(request.number, 0, True, request.item.num_bytes)
        self._encode_ranges(chunk, ranges)
        self._num_encoded += 1
        if self._num_encoded % CHUNKS_PER_TRIM == 0:
            trim_heap()
        return EncodeReply(chunk, self._spill_oldest() if len(self._held) > MAX_HELD_CHUNKS else None)

    def _chunk(self, item: int, block: int, is_last: bool, disk_bytes: int) -> EncodedChunk:
        keys = [KeyCounts() for _ in self._task.rules.keys]
        return EncodedChunk(item, block, is_last, disk_bytes, [], keys, worker=self._number)

    def _spill_oldest(self) -> Order:
        order = next(iter(self._held))
        self._held.pop(order).spill()
        return order

    def _encode_ranges(self, chunk: EncodedChunk, ranges: list[tuple[RangeCounts, Iterator[Batch]]]) -> None:
        held = _HeldChunk(chunk, self._task.folder)
        rejects: list[bytes] = []
        for number, (counts, batches) in enumerate(ranges):
            chunk.ranges.append(counts)
            before = [key.num_tokens for key in chunk.keys]
            for batch in batches:
                bad = sorted(batch.rejects + self._encode_batch(batch, held), key=lambda reject: reject.line)
                if bad and self._task.stop_on_bad_record:
                    chunk.bad = number, bad[0]
                    return
                rejects += [_reject_line(number, reject) for reject in bad]
                counts.num_lines = max(counts.num_lines, batch.num_lines)
                counts.num_records += len(batch.lines) + len(batch.rejects)
                counts.num_blank += batch.num_blank
                counts.num_rejected += len(bad)
                counts.num_replaced += batch.num_replaced
            counts.num_tokens = [key.num_tokens - then for key, then in zip(chunk.keys, before, strict=True)]
        if held.finish(b"".join(rejects)):
            self._held[chunk.order] = held

    def _encode_batch(self, batch: Batch, held: _HeldChunk) -> list[Reject]:
        """Encode into the chunk; gives the records that are bad because of special tokens in their text."""
        task = self._task
        encoded = []
        for texts in batch.texts:
            ids, offsets = self._encoder.encode(texts)
            encoded.append((ids, np.diff(offsets)))
        good = np.ones(len(batch.lines), dtype=bool)
        rejects: list[Reject] = []
        if task.special_tokens_in_text == "error":
            for (ids, lengths), key in zip(encoded, task.rules.keys, strict=True):
                places = np.flatnonzero(self._is_special[ids])
                for row in np.unique(np.searchsorted(np.cumsum(lengths), places, side="right")):
                    if good[row]:
                        good[row] = False
                        line = batch.lines[row]
                        rejects.append(Reject(line, f"{key!r} spells a special token", batch.raw(line)))
        for k, (ids, lengths) in enumerate(encoded):
            kept = good & (lengths > 0)
            held.chunk.keys[k].num_empty += int(np.count_nonzero(good & (lengths == 0)))
            if rejects:
                ids = ids[np.repeat(good, lengths)]
            self._check_range(ids)
            held.add(k, *finish(ids, lengths[kept], self._dtype, bos_id=task.bos_id, eod_id=task.eod_id))
        return rejects

    def _check_range(self, ids: NDArray[np.uint32]) -> None:
        limit = min(self._task.num_ids - 1, int(np.iinfo(self._dtype).max))
        if ids.size and (largest := int(ids.max())) > limit:
            raise DataError(
                f"token id {largest} does not fit in {self._dtype}",
                where="--dtype",
                needed=f"ids up to {limit}",
                action="leave --dtype out: the tokenizer's largest id decides",
            )


def _reject_line(number: int, reject: Reject) -> bytes:
    try:
        record = {"record": reject.raw.decode()}
    except UnicodeDecodeError:
        # Every byte as the character of the same number: nothing is lost.
        record = {"record_latin_1": reject.raw.decode("latin-1")}
    return json.dumps({"range": number, "line": reject.line, "found": reject.found, **record}).encode() + b"\n"
