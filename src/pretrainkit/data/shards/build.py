"""Makes token shards, each atomically: a tar, its table of samples and its record.

The parent process reads the input in order and hands out blocks of it; workers return encoded members of the tar,
which the parent joins in that order. A shard's bytes depend on its input and settings alone, not on the number of
workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pretrainkit import files
from pretrainkit.data.byte_progress import ByteProgress
from pretrainkit.data.indexed.manifest import tokenizer_record
from pretrainkit.data.shards.format import SAMPLE, ShardRecord, end_of_archive, record_to_json, shard_name
from pretrainkit.data.shards.inputs import ShardReader
from pretrainkit.data.shards.request import ShardPlan, check_set
from pretrainkit.data.shards.task import Piece, ShardBlock, ShardTask
from pretrainkit.data.tokens import encoder
from pretrainkit.data.tokens.encode_pool import EncodePool
from pretrainkit.data.tokens.encoder import EngineSpec
from pretrainkit.data.tokens.parity import EnginesDiffer, ParitySample
from pretrainkit.errors import DataError, RequestError
from pretrainkit.logs import get_logger
from pretrainkit.signals import stopped_by_signals
from pretrainkit.units import format_duration

LOGGER = get_logger(__name__)
COUNTS = ("num_records", "num_empty", "num_blank_lines", "num_replaced", "num_text_bytes")
"""Fields of a record that are sums over its pieces."""


def make_shards(plan: ShardPlan, shard_ids: list[int], *, stripe_count: int | None = None) -> list[ShardRecord]:
    """Make these shards, except those that exist and are current; gives their records.

    `stripe_count` spreads the files of the output folder over several Lustre targets.

    Raises RequestError before any work: a set made with other settings, or shards made of other input without
    `overwrite`; and before work on a shard that another process makes. Raises DataError when an input is bad or the
    machine fails, StoppedError on SIGTERM and Ctrl-C; a shard is then as it was before.
    """
    finished = check_set(plan)
    current = {number for number in shard_ids if number in finished and plan.is_current(finished[number])}
    stale = [number for number in shard_ids if number in finished and number not in current]
    if stale and not plan.request.overwrite:
        raise RequestError(
            f"{shard_name(stale[0])} was made from input that has changed since",
            where=str(plan.request.output_dir),
            action="give --overwrite to replace it once the new one is complete, or another --output_dir",
        )
    wanted = [number for number in shard_ids if number not in current]
    for number in sorted(current):
        LOGGER.info("%s is complete already", shard_name(number))
    _make_folder(plan.request.output_dir, stripe_count)
    if wanted:
        again = "run the same task again; finished shards stay"
        # The pool is closed inside and outside of the signals' context, so no signal can cut that short.
        with EncodePool(plan.request.workers) as pool, stopped_by_signals(again), contextlib.closing(pool):
            engine = _start(pool, plan, wanted)
            for number in wanted:
                finished[number] = _make_shard(plan, number, pool, engine)
    return [finished[number] for number in shard_ids]


def _make_folder(folder: Path, stripe_count: int | None) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), folder)
        raise RequestError(
            "is a file", where=str(file), needed="a folder", action="give another --output_dir"
        ) from error
    except OSError as error:
        raise RequestError(
            error.strerror or str(error), where=str(error.filename), action="make it, or free disk space"
        ) from error
    if stripe_count:
        _set_stripe(folder, stripe_count)


def _set_stripe(folder: Path, stripe_count: int) -> None:
    lfs = shutil.which("lfs")
    if lfs is None:
        LOGGER.warning("--stripe has no effect: this machine has no lfs command")
        return
    done = subprocess.run([lfs, "setstripe", "-c", str(stripe_count), str(folder)], capture_output=True, text=True)
    if done.returncode:
        LOGGER.warning("--stripe has no effect: lfs setstripe says: %s", done.stderr.strip())


def _start(pool: EncodePool, plan: ShardPlan, shard_ids: list[int]) -> str:
    """Start the workers, with fastokens if it gives the ids of tokenizers on a sample of these shards' input.

    Gives the name of the library that encodes.
    """
    request = plan.request
    task = ShardTask(
        first_ids=plan.first_ids,
        last_ids=plan.last_ids,
        num_ids=plan.tokenizer.num_ids,
        ids_format=request.ids_format,
        has_text=request.has_text,
        rules=plan.rules,
    )
    fast = EngineSpec("fastokens", str(plan.tokenizer.json_path), request.special_tokens_in_text == "encode")
    if request.engine == "auto" and encoder.default_engine() == "fastokens":
        sample = None
        if request.verify_tokens != "off":
            items = [item for number in shard_ids for item in plan.items(number)]
            sample = ParitySample.about(plan.tokenizer.special_tokens, plan.sources, items, plan.rules)
        try:
            pool.load(fast, with_reference=sample is not None)
            difference = pool.start(task, fast, request.workers, sample).result()
        except EnginesDiffer as error:
            difference = str(error)
        if not difference:
            if sample is not None:
                LOGGER.info("fastokens gives the ids of tokenizers on hard strings and a sample of this input")
            return "fastokens"
        LOGGER.warning("fastokens is not used, tokenizers encodes instead (slower): %s", difference)
    pool.start(task, fast.reference, request.workers)
    return "tokenizers"


def _make_shard(plan: ShardPlan, shard_id: int, pool: EncodePool, engine: str) -> ShardRecord:
    began = time.monotonic()
    try:
        with _ShardWriter(plan, shard_id) as writer:
            reader = ShardReader(plan.sources, plan.items(shard_id), plan.rules)
            with contextlib.closing(ByteProgress(reader.total_bytes, shard_name(shard_id))) as progress:
                for block, piece in pool.ordered(reader.blocks(f"sample_{shard_id}_")):
                    check_sizes(piece, block, reader)
                    writer.add(piece, block, reader)
                    progress.add(block.content.disk_bytes)
            record = writer.commit(reader, engine, time.monotonic() - began)
    except OSError as error:
        raise DataError(
            error.strerror or str(error),
            where=str(error.filename or plan.path(shard_id, ".tar")),
            action="fix it and run the same task again; nothing of this shard was committed",
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


class _HashedFile(files.WrittenThrough):
    """A new file and the hash of what is written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.hash = xxhash.xxh3_128()

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        self.hash.update(data)
        super().write(data)


class _ShardWriter:
    """Writes a shard's files under temporary names; `commit` gives them their final ones. Use as a context."""

    def __init__(self, plan: ShardPlan, shard_id: int) -> None:
        self._plan, self._shard_id = plan, shard_id
        self._record_path = plan.path(shard_id, ".json")
        self._finals = [plan.path(shard_id, suffix) for suffix in (".tar", ".samples", ".rejects.jsonl")]
        self._temporaries = [files.temporary_name(path) for path in self._finals]
        self._counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
        self._num_samples = self._num_tokens = self._num_rejected = 0

    def __enter__(self) -> _ShardWriter:
        for path in (*self._finals, self._record_path):
            _remove_leftovers(path)
        with contextlib.ExitStack() as stack:
            for path in self._temporaries:
                stack.callback(path.unlink, missing_ok=True)
            tar, samples, rejects = self._temporaries
            self._tar, self._samples = _HashedFile(tar), _HashedFile(samples)
            stack.enter_context(self._tar)
            stack.enter_context(self._samples)
            self._rejects = stack.enter_context(rejects.open("wb"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, piece: Piece, block: ShardBlock, reader: ShardReader) -> None:
        """Append a block's samples and rejected records.

        Raises DataError at a rejected record if the request says to stop there.
        """
        path = block.source.path
        for bad in sorted(piece.rejects, key=lambda reject: reject.line):
            line = reader.line_number(block, bad.line)
            if self._plan.request.on_error == "stop":
                raise DataError(
                    bad.found,
                    where=f"{path}:{line}",
                    action="correct the record, or set bad ones aside with --on_error skip",
                )
            record = bad.raw.decode(errors="backslashreplace")
            entry = {"path": path, "line": line, "found": bad.found, "record": record}
            self._rejects.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        table = np.empty(len(piece.offsets), SAMPLE)
        table["offset"] = piece.offsets + self._tar.num_bytes
        table["num_bytes"], table["num_tokens"] = piece.sizes, piece.num_tokens
        for members in piece.members:
            self._tar.write(members)
        self._samples.write(table.tobytes())
        self._num_samples += len(table)
        self._num_tokens += int(piece.num_tokens.sum())
        self._num_rejected += len(piece.rejects)
        for name in COUNTS:
            self._counts[name] += getattr(piece, name)

    def commit(self, reader: ShardReader, engine: str, elapsed_s: float) -> ShardRecord:
        """Finish the files and give them their names, the record last: it marks the shard as complete."""
        if self._num_samples:
            self._tar.write(end_of_archive(self._tar.num_bytes))
        self._rejects.flush()
        record = self._record(reader, engine, elapsed_s)
        for path in self._temporaries:
            files.fsync_path(path)
        self._record_path.unlink(missing_ok=True)  # without a record the shard counts as not made
        files.fsync_path(self._record_path.parent)
        is_wanted = (self._num_samples > 0, self._num_samples > 0, self._num_rejected > 0)
        for temporary, final, wanted in zip(self._temporaries, self._finals, is_wanted, strict=True):
            if wanted:
                files.commit(temporary, final)
            else:
                final.unlink(missing_ok=True)
        files.write_json(self._record_path, record_to_json(record))
        return record

    def _record(self, reader: ShardReader, engine: str, elapsed_s: float) -> ShardRecord:
        plan, request = self._plan, self._plan.request
        return ShardRecord(
            shard_id=self._shard_id,
            num_shards=plan.num_shards,
            num_samples=self._num_samples,
            num_tokens=self._num_tokens,
            num_rejected=self._num_rejected,
            **self._counts,
            tar_bytes=self._tar.num_bytes,
            tar_xxh3_128=self._tar.hash.hexdigest(),
            samples_xxh3_128=self._samples.hash.hexdigest(),
            ids_format=request.ids_format,
            has_text=request.has_text,
            settings=plan.settings,
            tokenizer=tokenizer_record(plan.tokenizer, engine, request.verify_tokens),
            inputs=reader.inputs(),
            elapsed_s=round(elapsed_s, 3),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
            pretrainkit_version=version("pretrainkit"),
        )


def _remove_leftovers(path: Path) -> None:
    """Remove what killed tasks left next to a file. Raises RequestError if a living process of this host writes it.

    What tasks of other hosts left is removed, too: nearly always they were killed and this is their rerun elsewhere.
    One that is alive then fails before it has changed anything.
    """
    for leftover in files.remove_leftovers(path):
        process = files.owner_of(leftover)
        if process not in (None, os.getpid()):
            raise RequestError(
                f"process {process} of this host is making this shard",
                where=str(path),
                needed="one task for each shard",
                action=f"wait until it ends, or end it; if it does something else, remove {leftover.name}",
            )
        leftover.unlink(missing_ok=True)


def check_sizes(piece: Piece, block: ShardBlock, reader: ShardReader) -> None:
    """Raises DataError for a sample whose ids take more bytes than its row of `.samples` can hold."""
    limit = np.iinfo(SAMPLE["num_bytes"]).max
    for number in np.flatnonzero(piece.sizes > limit)[:1]:
        line = reader.line_number(block, int(piece.lines[number]))
        raise DataError(
            f"the ids of this record take {piece.sizes[number]} bytes",
            where=f"{block.source.path}:{line}",
            needed=f"at most {limit} bytes",
            action="split the record, or set such long ones aside with --max_doc_bytes and --on_error skip",
        )
