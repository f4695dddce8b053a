"""Makes token shards: one tar each, with its samples' table and record; whole or not at all.

The parent reads the input in order and hands out blocks of it; workers give back pieces of the tar, which the
parent joins in that order. A shard's bytes depend on its input and settings alone, not on the number of workers.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import xxhash

from pretrainkit import files
from pretrainkit.data import encoder
from pretrainkit.data.byte_progress import ByteProgress
from pretrainkit.data.manifest import TokenizerRecord
from pretrainkit.data.proof import SAMPLE_PLACES
from pretrainkit.data.shard_index import SAMPLE, ShardRecord, record_to_json, shard_name
from pretrainkit.data.shard_inputs import ShardReader
from pretrainkit.data.shard_request import ShardPlan, check_set
from pretrainkit.data.shard_tar import end_of_archive
from pretrainkit.data.shard_task import Block, Piece, ShardEncoder, ShardSetup, start_worker, work
from pretrainkit.data.sources import Source
from pretrainkit.data.worker import Setup, prove_engine
from pretrainkit.errors import DataError, PretrainkitError, RequestError
from pretrainkit.logs import get_logger
from pretrainkit.units import format_duration

LOGGER = get_logger(__name__)
BLOCKS_AHEAD = 2
"""Blocks in hand for each worker: bounds memory."""


def make_shards(plan: ShardPlan, shard_ids: list[int]) -> list[ShardRecord]:
    """Make these shards, except those that are there and current; gives their records.

    Raises RequestError before any work: a set made otherwise, or shards made of other input without `overwrite`.
    Raises DataError when an input is bad or the machine fails; a shard is then as it was before.
    """
    finished = check_set(plan)
    current = {number for number in shard_ids if number in finished and plan.is_current(finished[number])}
    stale = [number for number in shard_ids if number in finished and number not in current]
    if stale and not plan.request.overwrite:
        raise RequestError(
            f"{shard_name(stale[0])} is there, made from input that has changed since",
            where=str(plan.request.output_dir),
            action="give --overwrite to replace it once the new one is complete, or another --output_dir",
        )
    wanted = [number for number in shard_ids if number not in current]
    for number in sorted(current):
        LOGGER.info("%s is complete already", shard_name(number))
    if wanted:
        plan.request.output_dir.mkdir(parents=True, exist_ok=True)
        with _stop_on_sigterm():
            engine = choose_engine(plan, wanted)
            with _Workers(plan, engine) as workers:
                for number in wanted:
                    finished[number] = _make_shard(plan, number, engine, workers)
    return [finished[number] for number in shard_ids]


def choose_engine(plan: ShardPlan, shard_ids: list[int]) -> str:
    """`fastokens` if it proves equal to `tokenizers` on hard strings and a sample of these shards' input."""
    request = plan.request
    if request.engine == "tokenizers" or not encoder.has_fastokens():
        return "tokenizers"
    if request.verify_tokens == "off":
        return "fastokens"
    units = [unit for number in shard_ids for unit in plan.units(number)]
    places = sorted({len(units) * i // SAMPLE_PLACES for i in range(SAMPLE_PLACES)}) if units else []
    setup = Setup(
        sources=plan.sources,
        folder=Path(),
        name="proof",
        json_path=str(plan.tokenizer.json_path),
        engine="fastokens",
        verify_all=False,
        special_tokens=plan.tokenizer.special_tokens,
        special_tokens_in_text=request.special_tokens_in_text,
        num_ids=plan.tokenizer.num_ids,
        rules=plan.rules,
        stop_on_bad_record=False,
        dtype="int32",
        bos_id=None,
        eod_id=None,
    )
    difference = prove_engine(setup, [units[place] for place in places])
    if difference is None:
        LOGGER.info("fastokens gives the ids of tokenizers on hard strings and a sample of this input")
        return "fastokens"
    LOGGER.warning("fastokens is not used, tokenizers encodes instead (slower): %s", difference.found)
    return "tokenizers"


@contextmanager
def _stop_on_sigterm() -> Iterator[None]:
    """A scheduler's SIGTERM ends the work as an error would, so that no temporary file stays."""

    def stop(number: int, _: Any) -> None:
        raise PretrainkitError("stopped by SIGTERM", action="run the same task again; finished shards stay")

    earlier = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


class _Workers:
    """Worker processes, or none: with one worker the parent itself encodes."""

    def __init__(self, plan: ShardPlan, engine: str) -> None:
        self._plan, self._engine = plan, engine
        self._pool: ProcessPoolExecutor | None = None
        self._encoder: ShardEncoder | None = None
        self.count = plan.request.workers

    def setup(self) -> ShardSetup:
        """What holds for all blocks; the key's prefix comes with each shard."""
        plan = self._plan
        return ShardSetup(
            json_path=str(plan.tokenizer.json_path),
            engine=self._engine,
            special_tokens_in_text=plan.request.special_tokens_in_text == "encode",
            first_ids=plan.first_ids,
            last_ids=plan.last_ids,
            num_ids=plan.tokenizer.num_ids,
            ids_format=plan.request.ids_format,
            has_text=plan.request.has_text,
            rules=plan.rules,
        )

    def __enter__(self) -> _Workers:
        if self.count == 1:
            encoder.one_thread()
            self._encoder = ShardEncoder(self.setup())
        else:
            context = get_context("spawn")  # nothing with threads may be forked
            self._pool = ProcessPoolExecutor(self.count, context, start_worker, (self.setup(),))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def pieces(self, blocks: Iterator[Block]) -> Iterator[tuple[Block, Piece]]:
        """Every block with its piece, in order."""
        if self._encoder is not None:
            for block in blocks:
                yield block, self._encoder.piece(block)
            return
        assert self._pool is not None
        waiting: deque[tuple[Block, Future[Piece]]] = deque()
        try:
            for block in blocks:
                waiting.append((block, self._pool.submit(work, block)))
                if len(waiting) >= BLOCKS_AHEAD * self.count:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process ended; the kernel kills one when memory runs out",
                action="run the same task again, with fewer --workers if memory was short",
            ) from error


def _make_shard(plan: ShardPlan, shard_id: int, engine: str, workers: _Workers) -> ShardRecord:
    began = time.monotonic()
    for suffix in (".tar", ".samples", ".json", ".rejects.jsonl"):
        for old in files.leftovers(plan.path(shard_id, suffix)):
            old.unlink(missing_ok=True)
    try:
        record = _write(plan, shard_id, engine, workers, began)
    except OSError as error:
        raise DataError(
            error.strerror or str(error),
            where=str(error.filename or plan.path(shard_id, ".tar")),
            action="mend it and run the same task again; nothing of this shard was committed",
        ) from error
    LOGGER.info(
        "%s: %d records in = %d samples + %d empty + %d rejected, %d tokens, %s, %s",
        shard_name(shard_id),
        record.num_records,
        record.num_samples,
        record.num_empty,
        record.num_rejected,
        record.num_tokens,
        format_duration(record.elapsed_s),
        engine,
    )
    return record


def _write(plan: ShardPlan, shard_id: int, engine: str, workers: _Workers, began: float) -> ShardRecord:
    tar, samples, mark = (plan.path(shard_id, suffix) for suffix in (".tar", ".samples", ".json"))
    rejects = plan.path(shard_id, ".rejects.jsonl")
    temporary = {path: files.temporary_name(path) for path in (tar, samples, rejects)}
    reader = ShardReader(plan.sources, plan.units(shard_id), plan.rules)
    totals = Piece()
    tar_hash, table_hash = xxhash.xxh3_128(), xxhash.xxh3_128()
    tar_bytes = num_samples = num_tokens = num_rejected = 0
    progress = ByteProgress(reader.total_bytes, shard_name(shard_id))
    try:
        with (
            temporary[tar].open("wb", buffering=0) as tar_file,
            temporary[samples].open("wb", buffering=0) as table_file,
            temporary[rejects].open("wb") as rejects_file,
        ):
            for block, piece in workers.pieces(reader.blocks(f"sample_{shard_id}_")):
                if piece.rejects and plan.request.on_error == "stop":
                    bad = min(piece.rejects, key=lambda reject: reject.line)
                    raise DataError(
                        bad.found,
                        where=f"{block.format_of.path}:{reader.lines_before(block.source) + bad.line + 1}",
                        action="mend the record, or set bad ones aside with --on_error skip",
                    )
                for bad in sorted(piece.rejects, key=lambda reject: reject.line):
                    line = reader.lines_before(block.source) + bad.line
                    rejects_file.write(_reject_line(block.format_of, line, bad.found, bad.raw))
                table = np.empty(len(piece.offsets), SAMPLE)
                table["offset"] = piece.offsets + tar_bytes
                table["num_bytes"], table["num_tokens"] = piece.sizes, piece.num_tokens
                _write_all(tar_file.write, piece.members)
                _write_all(table_file.write, table.tobytes())
                tar_hash.update(piece.members)
                table_hash.update(table.tobytes())
                tar_bytes += len(piece.members)
                num_samples += len(table)
                num_tokens += int(piece.num_tokens.sum())
                num_rejected += len(piece.rejects)
                for name in ("num_records", "num_empty", "num_blank", "num_replaced", "num_text_bytes"):
                    setattr(totals, name, getattr(totals, name) + getattr(piece, name))
                progress.add(block.disk_bytes)
            end = end_of_archive(tar_bytes) if num_samples else b""
            _write_all(tar_file.write, end)
            tar_hash.update(end)
        tar_bytes += len(end)
        elapsed_s = time.monotonic() - began
        request, tokenizer = plan.request, plan.tokenizer
        record = ShardRecord(
            shard_id=shard_id,
            num_shards=plan.num_shards,
            num_samples=num_samples,
            num_tokens=num_tokens,
            num_records=totals.num_records,
            num_empty=totals.num_empty,
            num_rejected=num_rejected,
            num_blank_lines=totals.num_blank,
            num_replaced=totals.num_replaced,
            num_text_bytes=totals.num_text_bytes,
            tar_bytes=tar_bytes,
            tar_xxh3_128=tar_hash.hexdigest(),
            samples_xxh3_128=table_hash.hexdigest(),
            ids_format=request.ids_format,
            has_text=request.has_text,
            settings=plan.settings,
            tokenizer=TokenizerRecord(
                name=tokenizer.name,
                sha256=tokenizer.sha256,
                largest_id=tokenizer.largest_id,
                eod_id=tokenizer.eod_id,
                bos_id=tokenizer.bos_id,
                engine=engine,
                versions=encoder.versions(),
                verified=request.verify_tokens if engine == "fastokens" else "",
            ),
            inputs=reader.inputs(),
            elapsed_s=round(elapsed_s, 3),
            finished_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            pretrainkit_version=version("pretrainkit"),
        )
        for path in temporary.values():
            files.fsync_path(path)
        mark.unlink(missing_ok=True)  # from here until the new mark is there, the shard counts as not made
        files.fsync_path(mark.parent)
        for path, is_wanted in ((tar, num_samples > 0), (samples, num_samples > 0), (rejects, num_rejected > 0)):
            if is_wanted:
                files.commit(temporary[path], path)
            else:
                path.unlink(missing_ok=True)
        files.write_json(mark, record_to_json(record))
        return record
    finally:
        progress.close()
        for path in temporary.values():
            path.unlink(missing_ok=True)


def _write_all(write: Callable[[memoryview], int | None], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[write(view) or 0 :]


def _reject_line(source: Source, line: int, found: str, raw: bytes) -> bytes:
    record = {"path": source.path, "line": line + 1, "found": found, "record": raw.decode(errors="backslashreplace")}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def set_stripe(folder: Path, stripe_count: int) -> None:
    """Spread files that will be made in a folder over several Lustre targets, where that is possible."""
    lfs = shutil.which("lfs")
    if lfs is None:
        LOGGER.warning("--stripe has no effect: this machine has no lfs command")
        return
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([lfs, "setstripe", "-c", str(stripe_count), str(folder)], capture_output=True, text=True)
    if done.returncode:
        LOGGER.warning("--stripe has no effect: lfs setstripe says: %s", done.stderr.strip())
