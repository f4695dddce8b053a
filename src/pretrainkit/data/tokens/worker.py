"""A worker process: reads its own pieces of the input, encodes them, and appends the ids to its part files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from pretrainkit.data.indexed.parts import HeldChunk, PartWriter, Place, write_at
from pretrainkit.data.indexed.results import BadRecord, ChunkResult, Difference, Failure, KeyResult, SpanResult
from pretrainkit.data.readers.chunks import Unit
from pretrainkit.data.readers.documents import BATCH_BYTES, Batch, RecordRules, Reject, parse_text
from pretrainkit.data.readers.sources import Source
from pretrainkit.data.readers.spans import read_span
from pretrainkit.data.tokens.encoder import Encoder, EngineSpec, finish, trim_heap
from pretrainkit.data.tokens.parity import Answers, ask, first_difference
from pretrainkit.errors import DataError

HOLD_BYTES = 48 << 20
"""A chunk with more ids than this goes to the part file at once instead of waiting in memory for its place."""
CHUNKS_PER_TRIM = 8
"""Free pages in the heap are given back after so many chunks: 11 MB a worker, for about 1% of its time."""


@dataclass(frozen=True)
class Setup:
    """All that a worker needs to know before its first piece."""

    engine: EngineSpec
    verify_all: bool
    """Compare every text with what tokenizers gives."""
    sources: list[Source]
    folder: Path
    name: str
    """Begins the names of its part files; a worker's number is added."""
    special_tokens: dict[str, int]
    special_tokens_in_text: str
    num_ids: int
    rules: RecordRules
    stop_on_bad_record: bool
    dtype: str
    bos_id: int | None
    eod_id: int | None


@dataclass(frozen=True)
class Encoders:
    """Loaded tokenizers."""

    encoder: Encoder
    reference: Encoder | None = None
    """Hugging Face tokenizers, when every text is compared with it."""


class _Stop(Exception):
    """Carries a report that ends this worker's chunk."""


def serve(connection: Connection, setup: Setup, encoders: Encoders, number: int) -> None:
    """Serve one parent until it is gone."""
    try:
        worker = _Worker(setup, encoders, number)
        while True:
            kind, *details = connection.recv()
            reply: object
            try:
                data = (connection.recv_bytes(),) if kind == "block" else ()
                reply = getattr(worker, kind)(*data, *details)
            except _Stop as stop:
                reply = stop.args[0]
            except (DataError, OSError, MemoryError) as error:
                reply = Failure.of(error)
            connection.send((kind, reply))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the parent was killed


class _Worker:
    def __init__(self, setup: Setup, encoders: Encoders, number: int) -> None:
        self.setup = setup
        self.dtype = np.dtype(setup.dtype)
        self.held: dict[tuple[int, int], HeldChunk] = {}
        self.num_encoded = 0
        self.parts = PartWriter(setup.folder, f"{setup.name}{number}", len(setup.rules.keys))
        self.encoder, self.reference = encoders.encoder, encoders.reference
        self.is_special = np.zeros(setup.num_ids, dtype=bool)
        self.is_special[list(setup.special_tokens.values())] = True

    def compare(self, answers: Answers) -> Difference | None:
        """Whether this engine gives the same ids as Hugging Face tokenizers."""
        found = first_difference(self.encoder, answers)
        return Difference(found) if found else None

    def unit(self, number: int, unit: Unit) -> ChunkResult:
        """Encode a unit that this worker reads itself."""
        disk_bytes = sum(span.num_bytes for span in unit.spans)
        sources, rules = self.setup.sources, self.setup.rules
        results = [SpanResult(span.source) for span in unit.spans]
        read = [read_span(sources[s.source], s, rules, result) for s, result in zip(unit.spans, results, strict=True)]
        return self._encode(number, 0, disk_bytes, [*zip(results, read, strict=True)])

    def block(self, data: bytes, number: int, block: int, source: int, disk_bytes: int) -> ChunkResult:
        """Encode a block of a stream that the parent has read."""
        batches = parse_text(self.setup.sources[source], data, block == 0, self.setup.rules, BATCH_BYTES)
        return self._encode(number, block, disk_bytes, [(SpanResult(source, num_bytes=len(data)), batches)])

    def _encode(
        self, unit: int, block: int, disk_bytes: int, spans: list[tuple[SpanResult, Iterator[Batch]]]
    ) -> ChunkResult:
        result = ChunkResult(unit, block, "", disk_bytes, [], [KeyResult() for _ in self.setup.rules.keys])
        held = HeldChunk(result)
        rejects: list[bytes] = []
        for span, batches in spans:
            result.spans.append(span)
            before = [key.num_tokens for key in result.keys]
            for batch in batches:
                bad = sorted(batch.rejects + self._encode_batch(batch, held), key=lambda reject: reject.line)
                if bad and self.setup.stop_on_bad_record:
                    raise _Stop(BadRecord(unit, block, span.source, bad[0].line, bad[0].found))
                rejects += [_reject_line(span.source, reject) for reject in bad]
                span.num_lines = max(span.num_lines, batch.num_lines)
                span.num_records += len(batch.lines) + len(batch.rejects)
                span.num_blank += batch.num_blank
                span.num_rejected += len(bad)
                span.num_replaced += batch.num_replaced
                if result.part or held.num_bytes > HOLD_BYTES:
                    self.parts.append(held)
            span.num_tokens = [key.num_tokens - then for key, then in zip(result.keys, before, strict=True)]
        if rejects:
            self.parts.append_rejects(held, b"".join(rejects))
        if not result.part:
            self.held[result.order] = held
        self.num_encoded += 1
        if self.num_encoded % CHUNKS_PER_TRIM == 0:
            trim_heap()
        return result

    def write(self, order: tuple[int, int], places: list[Place]) -> tuple[int, int]:
        """Bring a held chunk to its place; gives its order."""
        held = self.held.pop(order)
        for k, place in enumerate(places):
            write_at(place.tokens, place.tokens_offset, held.ids[k])
            write_at(place.lengths, place.lengths_offset, held.lengths[k])
        return order

    def spill(self, order: tuple[int, int]) -> ChunkResult:
        """Put a held chunk into the part file, since its turn is far; gives its result with the place there."""
        held = self.held.pop(order)
        self.parts.append(held)
        return held.result

    def _encode_batch(self, batch: Batch, held: HeldChunk) -> list[Reject]:
        """Encode into the chunk; gives the records that are bad because of special tokens in their text."""
        setup = self.setup
        encoded = [self._ids(texts) for texts in batch.texts]
        good = np.ones(len(batch.lines), dtype=bool)
        rejects: list[Reject] = []
        if setup.special_tokens_in_text == "error":
            for (ids, lengths), key in zip(encoded, setup.rules.keys, strict=True):
                places = np.flatnonzero(self.is_special[ids])
                for row in np.unique(np.searchsorted(np.cumsum(lengths), places, side="right")):
                    if good[row]:
                        good[row] = False
                        line = batch.lines[row]
                        rejects.append(Reject(line, f"{key!r} spells a special token", batch.raw(line)))
        for k, (ids, lengths) in enumerate(encoded):
            kept = good & (lengths > 0)
            held.result.keys[k].num_empty += int(np.count_nonzero(good & (lengths == 0)))
            if rejects:
                ids = ids[np.repeat(good, lengths)]
            self._check_range(ids)
            ids, new_lengths = finish(ids, lengths[kept], self.dtype, bos_id=setup.bos_id, eod_id=setup.eod_id)
            held.add(k, ids, new_lengths)
        return rejects

    def _ids(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = self.encoder.encode(texts)
        if self.reference is not None:
            answers = ask(self.reference, texts)
            if not (np.array_equal(ids, answers.ids) and np.array_equal(offsets, answers.offsets)):
                raise _Stop(Difference(first_difference(self.encoder, answers) or "ids changed on repetition"))
        return ids, np.diff(offsets)

    def _check_range(self, ids: np.ndarray) -> None:
        limit = min(self.setup.num_ids - 1, int(np.iinfo(self.dtype).max))
        if ids.size and (largest := int(ids.max())) > limit:
            raise DataError(
                f"token id {largest} does not fit in {self.dtype}",
                where="--dtype",
                needed=f"ids up to {limit}",
                action="leave --dtype out: the tokenizer's largest id decides",
            )


def _reject_line(source: int, reject: Reject) -> bytes:
    try:
        record = {"record": reject.raw.decode()}
    except UnicodeDecodeError:
        # Every byte as the character of the same number: nothing is lost.
        record = {"record_latin_1": reject.raw.decode("latin-1")}
    return json.dumps({"source": source, "line": reject.line, "found": reject.found, **record}).encode() + b"\n"
