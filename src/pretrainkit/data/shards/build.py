"""Makes token shards: one tar each, with its samples' table and record; whole or not at all.

The parent reads the input in order and hands out blocks of it; workers give back pieces of the tar, which the
parent joins in that order. A shard's bytes depend on its input and settings alone, not on the number of workers.
"""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np
import xxhash

from pretrainkit import files
from pretrainkit.data.byte_progress import ByteProgress
from pretrainkit.data.indexed.manifest import TokenizerRecord
from pretrainkit.data.readers.source import Source
from pretrainkit.data.shards.format import SAMPLE, ShardRecord, record_to_json, shard_name
from pretrainkit.data.shards.inputs import ShardReader
from pretrainkit.data.shards.request import ShardPlan, check_set
from pretrainkit.data.shards.tar import end_of_archive
from pretrainkit.data.shards.task import Block, Piece
from pretrainkit.data.shards.workers import ShardWorkers
from pretrainkit.data.tokens import encoder
from pretrainkit.errors import DataError, RequestError
from pretrainkit.logs import get_logger
from pretrainkit.signals import stopped_by_signals
from pretrainkit.units import format_duration

LOGGER = get_logger(__name__)


def make_shards(plan: ShardPlan, shard_ids: list[int]) -> list[ShardRecord]:
    """Make these shards, except those that are there and current; gives their records.

    Raises RequestError before any work: a set made otherwise, or shards made of other input without `overwrite`; and
    before work on a shard that another process makes. Raises DataError when an input is bad or the machine fails,
    StoppedError on SIGTERM and Ctrl-C; a shard is then as it was before.
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
        _make_folder(plan.request.output_dir)
        again = "run the same task again; finished shards stay"
        # Twice a context: signals neither keep it from its end, nor does a second one cut the end short.
        with ShardWorkers(plan, wanted) as workers, stopped_by_signals(again), workers:
            workers.start()
            for number in wanted:
                finished[number] = _make_shard(plan, number, workers)
    return [finished[number] for number in shard_ids]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), folder)
        raise RequestError(
            "is a file", where=str(file), needed="a folder", action="give another --output_dir"
        ) from error
    except OSError as error:
        raise RequestError(
            error.strerror or str(error), where=str(error.filename), action="make it, or room"
        ) from error


def _clear(path: Path) -> None:
    """Remove what killed tasks left beside a file. Raises RequestError if a living process of this host writes it.

    What tasks of other hosts left is removed, too: nearly always they were killed and this is their rerun elsewhere.
    One that lives then fails before it has changed anything.
    """
    for rest in files.remove_leftovers(path):
        process = files.owner_of(rest)
        if process not in (None, os.getpid()):
            raise RequestError(
                f"process {process} of this host is making this shard",
                where=str(path),
                needed="one task for each shard",
                action=f"let it finish, or end it; if that process does something else, remove {rest.name}",
            )
        rest.unlink(missing_ok=True)


def _make_shard(plan: ShardPlan, shard_id: int, workers: ShardWorkers) -> ShardRecord:
    began = time.monotonic()
    for suffix in (".tar", ".samples", ".json", ".rejects.jsonl"):
        _clear(plan.path(shard_id, suffix))
    try:
        record = _write(plan, shard_id, workers, began)
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
        workers.engine,
    )
    return record


def _write(plan: ShardPlan, shard_id: int, workers: ShardWorkers, began: float) -> ShardRecord:
    tar, samples, mark = (plan.path(shard_id, suffix) for suffix in (".tar", ".samples", ".json"))
    rejects = plan.path(shard_id, ".rejects.jsonl")
    temporary = {path: files.temporary_name(path) for path in (tar, samples, rejects)}
    reader = ShardReader(plan.sources, plan.units(shard_id), plan.rules)
    totals = Piece()
    tar_hash, table_hash = xxhash.xxh3_128(), xxhash.xxh3_128()
    num_samples = num_tokens = num_rejected = 0
    progress = ByteProgress(reader.total_bytes, shard_name(shard_id))
    try:
        with (
            files.WrittenThrough(temporary[tar]) as tar_file,
            files.WrittenThrough(temporary[samples]) as table_file,
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
                check_sizes(piece, block, reader)
                table = np.empty(len(piece.offsets), SAMPLE)
                table["offset"] = piece.offsets + tar_file.num_bytes
                table["num_bytes"], table["num_tokens"] = piece.sizes, piece.num_tokens
                for members in piece.members:
                    tar_file.write(members)
                    tar_hash.update(members)
                table_file.write(table.tobytes())
                table_hash.update(table.tobytes())
                num_samples += len(table)
                num_tokens += int(piece.num_tokens.sum())
                num_rejected += len(piece.rejects)
                for name in ("num_records", "num_empty", "num_blank", "num_replaced", "num_text_bytes"):
                    setattr(totals, name, getattr(totals, name) + getattr(piece, name))
                progress.add(block.disk_bytes)
            end = end_of_archive(tar_file.num_bytes) if num_samples else b""
            tar_file.write(end)
            tar_hash.update(end)
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
            tar_bytes=tar_file.num_bytes,
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
                engine=workers.engine,
                versions=encoder.versions(),
                verified=request.verify_tokens if workers.engine == "fastokens" else "",
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


def check_sizes(piece: Piece, block: Block, reader: ShardReader) -> None:
    """Raises DataError for a sample whose ids take more bytes than its row of `.samples` can tell."""
    limit = np.iinfo(SAMPLE["num_bytes"]).max
    for number in np.flatnonzero(piece.sizes > limit)[:1]:
        line = reader.lines_before(block.source) + int(piece.lines[number]) + 1
        raise DataError(
            f"the ids of this record take {piece.sizes[number]} bytes",
            where=f"{block.format_of.path}:{line}",
            needed=f"at most {limit} bytes",
            action="split the record, or set such long ones aside with --max_doc_bytes and --on_error skip",
        )


def _reject_line(source: Source, line: int, found: str, raw: bytes) -> bytes:
    record = {"path": source.path, "line": line + 1, "found": found, "record": raw.decode(errors="backslashreplace")}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"
