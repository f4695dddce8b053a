"""What a worker of preprocessing does: reads and encodes pieces of the input, and writes their tokens.

It holds an encoded chunk in memory until a request says where to write it: its place in the output, or part files.
A request is a call of one of its methods: `partial(Worker.encode_item, number=..., item=...)`.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrainkit.data.decontamination.overlap import Decontaminated, OverlapFinder, OverlapIndex
from pretrainkit.data.indexed.chunk import Chunk, Column, Order, Target
from pretrainkit.data.indexed.file_bytes import copy_range, write_at
from pretrainkit.data.indexed.labels import count_labels, text_sizes
from pretrainkit.data.indexed.request import Plan
from pretrainkit.data.readers.records import Batch, Reject
from pretrainkit.data.readers.source import RangeCounts
from pretrainkit.data.readers.text import BATCH_BYTES
from pretrainkit.data.readers.work_items import WorkItem
from pretrainkit.data.tokens.encoder import Encoder, finish, trim_heap
from pretrainkit.data.tokens.spelled import SpelledTokens
from pretrainkit.errors import DataError

MAX_HELD_BYTES = 48 << 20
"""Tokens of a chunk above which they go to part files while it is encoded."""
CHUNKS_PER_TRIM = 8
"""Free pages in the heap are given back after so many chunks: 11 MB a worker, for about 1% of its time."""


@dataclass(frozen=True)
class IndexedTask:
    """Opens the workers of a run."""

    plan: Plan
    """Without its items: a request has one."""
    overlaps: OverlapIndex | None
    """With the evaluation sets, where documents must not overlap with any."""

    def open(self, encoder: Encoder, worker: int) -> Callable[[Callable[[Worker], Any]], Any]:
        """The function that carries out requests."""
        opened = Worker(self.plan, encoder, worker, self.overlaps)
        return lambda request: request(opened)


class _HeldChunk:
    """A chunk whose last tokens and lengths, or all of them, are in memory."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self._clear()

    def _clear(self) -> None:
        self._arrays: list[list[NDArray]] = [[] for _ in self.chunk.columns]
        self._begins = [column.num_bytes for column in self.chunk.columns]
        self.num_bytes = 0

    def add(self, k: int, *columns: NDArray) -> None:
        """Add a key's documents [ids, lengths, and labels if they have some]."""
        for c, array in enumerate(columns, k * len(columns)):
            if array.size:
                self._arrays[c].append(array)
                self.chunk.columns[c].add(array)
                self.num_bytes += array.nbytes

    def write(self, targets: list[Target]) -> None:
        """Write what is in memory to files that hold what isn't."""
        for arrays, begin, (path, offset) in zip(self._arrays, self._begins, targets, strict=True):
            write_at(path, offset + begin, arrays)
        self._clear()


class Worker:
    """Encodes chunks and holds them."""

    def __init__(self, plan: Plan, encoder: Encoder, number: int, overlaps: OverlapIndex | None) -> None:
        self._plan, self._rules, self._folder = plan, plan.rules, plan.state_folder
        self._encoder, self._number = encoder, number
        self._first_ids, self._last_ids = plan.first_ids, plan.last_ids
        self._held: dict[Order, _HeldChunk] = {}
        self._num_encoded = 0
        self._is_special = np.zeros(plan.tokenizer.num_ids, dtype=bool)
        self._overlaps = OverlapFinder(overlaps) if overlaps else None
        self._spelled = SpelledTokens(plan.tokenizer.special_tokens)
        self._is_special[list(plan.tokenizer.special_tokens.values())] = True

    def encode_item(self, number: int, item: WorkItem) -> Chunk:
        """Read and encode a work item of this number."""
        chunk = self._chunk(number, 0, is_last=True, disk_bytes=item.num_bytes)
        sources, rules = self._plan.sources, self._rules
        ranges = [(RangeCounts(part.source), part) for part in item.ranges]
        read = ((counts, sources[part.source].read(part, rules, counts)) for counts, part in ranges)
        return self._encode_ranges(chunk, read)

    def encode_block(self, number: int, block: int, counts: RangeCounts, data: bytes, disk_bytes: int) -> Chunk:
        """Encode a block of a stream that is the work item of this number; its last block is empty."""
        chunk = self._chunk(number, block, is_last=not data, disk_bytes=disk_bytes)
        parse = self._plan.sources[counts.source].parse
        batches = parse(data, block == 0, self._rules, BATCH_BYTES) if data else ()
        return self._encode_ranges(chunk, [(counts, batches)])

    def write(self, chunk: Chunk, targets: list[Target]) -> None:
        """Write a chunk that is held, and hold it no longer, or copy its part files: a target for each column."""
        if held := self._held.pop(chunk.order, None):
            held.write(targets)
            return
        parts = chunk.parts(self._folder)
        for column, (source, begin), (target, offset) in zip(chunk.columns, parts, targets, strict=True):
            if column.num_bytes:  # an empty file may have been lost in a power cut
                copy_range(source, begin, target, offset, column.num_bytes)

    def _chunk(self, item: int, block: int, *, is_last: bool, disk_bytes: int) -> Chunk:
        num_keys = len(self._rules.keys)
        columns = [Column() for _ in range(len(self._plan.columns) * num_keys)]
        return Chunk(item, block, is_last, disk_bytes, columns, [0] * num_keys, worker=self._number)

    def _encode_ranges(self, chunk: Chunk, ranges: Iterable[tuple[RangeCounts, Iterable[Batch]]]) -> Chunk:
        held = _HeldChunk(chunk)
        parts = chunk.parts(self._folder)
        rejects: list[bytes] = []
        for number, (counts, batches) in enumerate(ranges):
            chunk.ranges.append(counts)
            counts.num_spelled = [0] * len(self._rules.keys)
            counts.num_text_bytes = [0] * len(self._rules.keys)
            counts.labels = [{} for _ in self._rules.keys if self._rules.label_key]
            tokens = chunk.columns[:: len(self._plan.columns)]
            before = [column.num_bytes for column in tokens]
            for whole in batches:
                looked_at = self._overlaps.decontaminate(whole) if self._overlaps else Decontaminated(whole)
                batch = looked_at.batch
                counts.num_contaminated += looked_at.num_left_out
                counts.overlaps = dict(looked_at.overlaps + Counter(counts.overlaps))
                if self._plan.request.special_tokens_in_text != "error":  # else such records are bad
                    spelled = map(self._spelled.count, batch.texts)
                    counts.num_spelled = [a + b for a, b in zip(counts.num_spelled, spelled, strict=True)]
                bad = sorted(batch.rejects + self._encode_batch(batch, held, counts), key=lambda reject: reject.line)
                if bad and self._plan.request.on_error == "stop":
                    chunk.bad = number, bad[0]
                    return chunk
                set_aside = sorted(bad + looked_at.found, key=lambda reject: reject.line)
                rejects += [_reject_line(number, reject) for reject in set_aside]
                counts.num_lines = max(counts.num_lines, batch.num_lines)
                counts.num_records += len(whole.lines) + len(whole.rejects)
                counts.num_blank += batch.num_blank
                counts.num_rejected += len(bad)
                counts.num_replaced += batch.num_replaced
                if held.num_bytes > MAX_HELD_BYTES:
                    held.write(parts)
                    chunk.worker = None
            added = (column.num_bytes - then for column, then in zip(tokens, before, strict=True))
            counts.num_tokens = [num_bytes // self._plan.dtype.itemsize for num_bytes in added]
        if rejects:
            chunk.rejects.add(b"".join(rejects))
            write_at(chunk.rejects_path(self._folder), 0, rejects)
        if chunk.worker is None:
            held.write(parts)
        else:
            self._held[chunk.order] = held
        self._num_encoded += 1
        if self._num_encoded % CHUNKS_PER_TRIM == 0:
            trim_heap()
        return chunk

    def _encode_batch(self, batch: Batch, held: _HeldChunk, counts: RangeCounts) -> list[Reject]:
        """Encode into the chunk; gives the records that are bad because of special tokens in their text."""
        plan = self._plan
        encoded = []
        for texts in batch.texts:
            ids, offsets = self._encoder.encode(texts)
            encoded.append((ids, np.diff(offsets)))
        good = np.ones(len(batch.lines), dtype=bool)
        rejects: list[Reject] = []
        if plan.request.special_tokens_in_text == "error":
            for (ids, lengths), key in zip(encoded, self._rules.keys, strict=True):
                places = np.flatnonzero(self._is_special[ids])
                for row in np.unique(np.searchsorted(np.cumsum(lengths), places, side="right")):
                    if good[row]:
                        good[row] = False
                        line = batch.lines[row]
                        rejects.append(Reject(line, f"{key!r} spells a special token", batch.raw(line)))
        for k, ((ids, lengths), texts) in enumerate(zip(encoded, batch.texts, strict=True)):
            kept = good & (lengths > 0)
            sizes = text_sizes(itertools.compress(texts, kept))
            counts.num_text_bytes[k] += int(sizes.sum())
            held.chunk.num_empty[k] += int(np.count_nonzero(good & (lengths == 0)))
            if rejects:
                ids = ids[np.repeat(good, lengths)]
            self._check_range(ids)
            ids, lengths = finish(ids, lengths[kept], plan.dtype, first=self._first_ids, last=self._last_ids)
            labels = [
                count_labels(itertools.compress(batch.labels, kept), lengths, sizes, found)
                for found in counts.labels[k : k + 1]
            ]
            held.add(k, ids, lengths, *labels)
        return rejects

    def _check_range(self, ids: NDArray[np.uint32]) -> None:
        limit = min(self._plan.tokenizer.largest_id, int(np.iinfo(self._plan.dtype).max))
        if ids.size and (largest := int(ids.max())) > limit:
            raise DataError(
                f"token id {largest} does not fit in {self._plan.dtype}",
                where="--dtype",
                needed=f"ids up to {limit}",
                action="leave --dtype out: the tokenizer's largest id decides",
            )


def _reject_line(number: int, reject: Reject) -> bytes:
    try:
        record: dict[str, Any] = {"record": reject.raw.decode()}
    except UnicodeDecodeError:
        # Every byte as the character of the same number: nothing is lost.
        record = {"record_latin_1": reject.raw.decode("latin-1")}
    if reject.is_kept:
        record = {"kept": True}
    return json.dumps({"range": number, "line": reject.line, "found": reject.found, **record}).encode() + b"\n"
