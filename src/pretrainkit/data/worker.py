"""A worker process: reads its own pieces of the input, encodes them, and appends the ids to its part files."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import xxhash

from pretrainkit.data.chunks import Span, Unit
from pretrainkit.data.documents import Batch, RecordRules, Reject, parse_text, read_lines_between
from pretrainkit.data.encoder import Encoder, FastEncoder, ReferenceEncoder, finish, one_thread
from pretrainkit.data.parts import HeldChunk, PartWriter, Place, write_at
from pretrainkit.data.proof import SAMPLE_BYTES, first_difference, hard_strings
from pretrainkit.data.results import BadRecord, ChunkResult, KeyResult, SpanResult
from pretrainkit.data.sources import Source
from pretrainkit.data.streams import BLOCK_BYTES, PieceHash, read_blocks
from pretrainkit.data.tables import read_rows
from pretrainkit.errors import DataError


@dataclass(frozen=True)
class Setup:
    """All that a worker needs to know before its first piece."""

    sources: list[Source]
    folder: Path
    name: str
    json_path: str
    engine: str
    verify_all: bool
    special_tokens: dict[str, int]
    special_tokens_in_text: str
    num_ids: int
    rules: RecordRules
    stop_on_bad_record: bool
    dtype: str
    bos_id: int | None
    eod_id: int | None


@dataclass(frozen=True)
class Difference:
    """fastokens gave other ids than tokenizers."""

    found: str


@dataclass(frozen=True)
class Failure:
    """An error of the machine or the input, to be raised again by the parent."""

    found: str
    where: str = ""
    needed: str = ""
    action: str = ""


HOLD_BYTES = 48 << 20
"""A chunk with more ids than this goes to the part file at once instead of waiting in memory for its place."""


class _Stop(Exception):
    """Carries a report that ends this worker's chunk."""


def serve(connection: Connection, inherited: Iterable[Connection]) -> None:
    """Serve one parent until it is gone. `inherited` are other workers' ends, closed at once."""
    for other in inherited:
        other.close()
    # Ctrl-C and a scheduler's SIGTERM reach the whole group; the parent decides what then happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    one_thread()
    worker: _Worker | None = None
    early: FastEncoder | None = None
    try:
        while True:
            kind, *details = connection.recv()
            if kind == "load":
                early = _load_early(*details)
                continue
            try:
                reply: object = None
                if kind == "setup":
                    try:
                        worker = _Worker(details[0], early)
                    except Exception as error:  # whatever a Rust library thinks of a tokenizer
                        if details[0].engine != "fastokens":
                            raise
                        reply = Difference(f"it does not load this tokenizer: {error}")
                else:
                    assert worker is not None
                    data = (connection.recv_bytes(),) if kind == "block" else ()
                    reply = getattr(worker, kind)(*data, *details)
            except _Stop as stop:
                reply = stop.args[0]
            except DataError as error:
                reply = Failure(error.found, error.where, error.needed, error.action)
            except OSError as error:
                reply = Failure(f"{error.strerror or error}", str(error.filename or ""))
            except MemoryError:
                reply = Failure("out of memory", action="use fewer --workers, or set --max-doc-bytes")
            connection.send((kind, reply))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(1)  # the parent was killed


def _load_early(json_path: str, special_tokens: bool) -> FastEncoder | None:
    """Load a tokenizer while the parent still checks the request; what is wrong with it is said at the setup."""
    try:
        return FastEncoder(json_path, special_tokens=special_tokens)
    except Exception:
        return None


def prove_engine(setup: Setup, units: list[Unit]) -> Difference | None:
    """What `fastokens` does differently from `tokenizers` on hard strings and a sample of these units, if anything."""
    try:
        with tempfile.TemporaryDirectory(prefix="pretrainkit-proof-") as folder:
            return _Worker(replace(setup, folder=Path(folder))).prove(units)
    except (DataError, OSError):
        raise
    except Exception as error:  # whatever a Rust library thinks of a tokenizer
        return Difference(f"it does not load this tokenizer: {error}")


class _Worker:
    def __init__(self, setup: Setup, early: FastEncoder | None = None) -> None:
        self.setup = setup
        self.dtype = np.dtype(setup.dtype)
        self.held: dict[tuple[int, int], HeldChunk] = {}
        self.parts = PartWriter(setup.folder, setup.name, len(setup.rules.keys))
        special = setup.special_tokens_in_text != "plain"
        self.encoder: Encoder
        if setup.engine == "tokenizers":
            self.encoder = ReferenceEncoder(setup.json_path, special_tokens=special)
        elif early is not None and early.json_path == setup.json_path:
            self.encoder = early
        else:
            self.encoder = FastEncoder(setup.json_path, special_tokens=special)
        self.reference: Encoder | None = None
        if setup.verify_all and setup.engine == "fastokens":
            self.reference = ReferenceEncoder(setup.json_path, special_tokens=special)
        self.is_special = np.zeros(setup.num_ids, dtype=bool)
        self.is_special[list(setup.special_tokens.values())] = True

    def prove(self, units: list[Unit]) -> Difference | None:
        """Compare the engine with Hugging Face tokenizers on hard strings and on a sample of these units."""
        setup = self.setup
        special = setup.special_tokens_in_text != "plain"
        reference = ReferenceEncoder(setup.json_path, special_tokens=special)
        texts = hard_strings(setup.special_tokens)
        for unit in units:
            texts += self._sample(unit)
        found = first_difference(self.encoder, reference, texts)
        return Difference(found) if found else None

    def _sample(self, unit: Unit) -> Iterator[str]:
        room = SAMPLE_BYTES
        for batch in islice(self._sample_batches(unit), 4):
            for texts in zip(*batch.texts, strict=True):
                for text in texts:
                    yield text[:room]
                    room -= len(text.encode())
                    if room <= 0:
                        return

    def _sample_batches(self, unit: Unit) -> Iterator[Batch]:
        setup = self.setup
        for span in unit.spans:
            source = setup.sources[span.source]
            if unit.is_stream:
                for data, _ in islice(read_blocks(source, PieceHash()), 1):
                    yield from parse_text(source, data[: data.rfind(b"\n", 0, 1 << 17) + 1 or None], True, setup.rules)
            elif source.format in ("parquet", "arrow"):
                yield from read_rows(source, span.begin, span.end, setup.rules)
            else:
                end = min(span.end, span.begin + 2 * SAMPLE_BYTES)
                data, _, _ = read_lines_between(source.path, span.begin, end)
                yield from parse_text(source, data, span.begin == 0, setup.rules)

    def unit(self, number: int, unit: Unit) -> ChunkResult:
        """Encode a unit that this worker reads itself."""
        disk_bytes = sum(span.num_bytes for span in unit.spans)
        return self._encode(number, 0, disk_bytes, [(span.source, *self._read(span)) for span in unit.spans])

    def _read(self, span: Span) -> tuple[list[str], int, Iterable[Batch]]:
        """Digests of the span's pieces, its decompressed bytes, and its records."""
        setup, source = self.setup, self.setup.sources[span.source]
        if source.format in ("parquet", "arrow"):
            return _piece_digests(source, span), span.num_bytes, read_rows(source, span.begin, span.end, setup.rules)
        if source.format == "txt-file":
            whole = Path(source.path).read_bytes()
            return _piece_digests(source, span), len(whole), parse_text(source, whole, True, setup.rules)
        data, nominal, _ = read_lines_between(source.path, span.begin, span.end)
        if len(nominal) != span.end - span.begin:
            raise DataError("the file became shorter while it was read", where=source.path)
        return [xxhash.xxh3_128_hexdigest(nominal)], len(data), parse_text(source, data, span.begin == 0, setup.rules)

    def block(self, data: bytes, number: int, block: int, source: int, disk_bytes: int) -> ChunkResult:
        """Encode a block of a stream that the parent has read."""
        batches = parse_text(self.setup.sources[source], data, block == 0, self.setup.rules)
        return self._encode(number, block, disk_bytes, [(source, [], len(data), batches)])

    def _encode(
        self, unit: int, block: int, disk_bytes: int, spans: list[tuple[int, list[str], int, Iterable[Batch]]]
    ) -> ChunkResult:
        result = ChunkResult(unit, block, "", disk_bytes, [], [KeyResult() for _ in self.setup.rules.keys])
        held = HeldChunk(result)
        rejects: list[bytes] = []
        for source, digests, num_bytes, batches in spans:
            span = SpanResult(source, digests=digests, num_bytes=num_bytes)
            result.spans.append(span)
            before = [key.num_tokens for key in result.keys]
            for batch in batches:
                bad = sorted(batch.rejects + self._encode_batch(batch, held), key=lambda reject: reject.line)
                if bad and self.setup.stop_on_bad_record:
                    raise _Stop(BadRecord(unit, block, source, bad[0].line, bad[0].found))
                rejects += [_reject_line(source, reject) for reject in bad]
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
            wanted, wanted_offsets = self.reference.encode(texts)
            if not (np.array_equal(ids, wanted) and np.array_equal(offsets, wanted_offsets)):
                raise _Stop(
                    Difference(first_difference(self.encoder, self.reference, texts) or "ids changed on repetition")
                )
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


def _piece_digests(source: Source, span: Span) -> list[str]:
    digests = []
    with Path(source.path).open("rb", buffering=0) as file:
        file.seek(span.first_piece * BLOCK_BYTES)
        for _ in range(span.first_piece, span.end_piece):
            digests.append(xxhash.xxh3_128_hexdigest(file.read(BLOCK_BYTES)))
    return digests


def _reject_line(source: int, reject: Reject) -> bytes:
    try:
        record = {"record": reject.raw.decode()}
    except UnicodeDecodeError:
        # Every byte as the character of the same number: nothing is lost.
        record = {"record_latin_1": reject.raw.decode("latin-1")}
    return json.dumps({"source": source, "line": reject.line, "found": reject.found, **record}).encode() + b"\n"
