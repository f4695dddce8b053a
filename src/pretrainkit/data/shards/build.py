"""Makes token shards, each atomically: a tar, its table of samples and its record.

The parent process reads the input in order and hands out blocks of it; workers return encoded members of the tar,
which the parent joins in that order. A shard's bytes depend on its input and settings alone, not on the number of
workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from pretrainkit import files
from pretrainkit.data.byte_progress import ByteProgress
from pretrainkit.data.decontamination.overlap import build_index
from pretrainkit.data.indexed.manifest import made_now, tokenizer_record
from pretrainkit.data.shards.blocks import InputReader, Piece, ShardBlock
from pretrainkit.data.shards.format import COUNTS, ShardRecord, end_of_archive, shard_name
from pretrainkit.data.shards.request import ShardPlan, check_set
from pretrainkit.data.tokens import encoder
from pretrainkit.data.tokens.encode_here import EncodeHere
from pretrainkit.data.tokens.encode_pool import EncodePool
from pretrainkit.data.tokens.parity import EnginesDiffer, ParitySample
from pretrainkit.errors import DataError, RequestError, machine_errors
from pretrainkit.logs import get_logger
from pretrainkit.signals import stopped_by_signals

LOGGER = get_logger(__name__)


def make_shards(plan: ShardPlan, shard_ids: list[int], *, stripe_count: int | None = None) -> list[ShardRecord]:
    """Make these shards, except those that exist and are current; gives their records.

    `stripe_count` spreads the files of the output folder over several Lustre targets.

    Raises RequestError before any work: a set made with other settings, or shards made of other input without
    `overwrite`; and before work on a shard that another process makes. Raises DataError when an input is bad or the
    machine fails, StoppedError on SIGTERM and Ctrl-C; a shard is then as it was before.
    """
    finished = check_set(plan)
    current = {number for number in shard_ids if number in finished and plan.is_current(finished[number])}
    damaged = {number for number in current if _warn_of_damage(plan.damage(finished[number]))}
    stale = [number for number in shard_ids if number in finished and number not in current]
    if stale and not plan.request.overwrite:
        raise RequestError(
            f"{shard_name(stale[0])} was made from input that has changed since",
            where=str(plan.request.output_dir),
            action="give --overwrite to replace it once the new one is complete, or another --output_dir",
        )
    wanted = [number for number in shard_ids if number not in current or number in damaged]
    for number in sorted(current - damaged):
        LOGGER.info("%s is complete already", shard_name(number))
    _make_folder(plan.request.output_dir, stripe_count)
    if wanted:
        if evaluations := plan.request.evaluations():
            plan = replace(plan, task=replace(plan.task, overlaps=build_index(evaluations)))
        again = "run the same task again; finished shards stay"
        # The pool is closed inside and outside of the signals' context, so no signal can cut that short.
        workers = plan.request.workers
        encoders = EncodePool(workers) if workers > 1 else EncodeHere()
        with encoders as pool, stopped_by_signals(again), contextlib.closing(pool):
            engine = _start(pool, plan, wanted)
            for number in wanted:
                finished[number] = _make_shard(plan, number, pool, engine)
    return [finished[number] for number in shard_ids]


def _warn_of_damage(damage: str) -> bool:
    if damage:
        LOGGER.warning("%s: this shard is made again", damage)
    return bool(damage)


def _make_folder(folder: Path, stripe_count: int | None) -> None:
    file = files.nearest_existing(folder)
    if not file.is_dir():
        raise RequestError("is a file", where=str(file), needed="a folder", action="give another --output_dir")
    with machine_errors(folder, "make it, or free disk space", RequestError):
        folder.mkdir(parents=True, exist_ok=True)
    if stripe_count:
        try:
            command = ["lfs", "setstripe", "-c", str(stripe_count), str(folder)]
            subprocess.run(command, capture_output=True, text=True, check=True)
        except FileNotFoundError:
            LOGGER.warning("--stripe has no effect: this machine has no lfs command")
        except subprocess.CalledProcessError as error:
            LOGGER.warning("--stripe has no effect: lfs setstripe says: %s", error.stderr.strip())


def _start(pool: EncodePool | EncodeHere, plan: ShardPlan, shard_ids: list[int]) -> str:
    """Start the workers, with fastokens if it gives the ids of tokenizers on a sample of these shards' input.

    Gives the name of the library that encodes.
    """
    request = plan.request
    fast = request.engine_spec("fastokens", plan.tokenizer.json_path)
    if request.engine == "auto" and encoder.default_engine() == "fastokens":
        sample = None
        if request.verify_tokens != "off":
            items = [item for number in shard_ids for item in plan.items(number)]
            sample = ParitySample.about(plan.tokenizer.special_tokens, plan.sources, items, plan.task.rules)
        try:
            if difference := pool.start(plan.task, fast, request.workers, sample).result():
                raise EnginesDiffer(difference)
            if sample is not None:
                LOGGER.info("fastokens gives the ids of tokenizers on hard strings and a sample of this input")
            return "fastokens"
        except EnginesDiffer as difference:
            LOGGER.warning("fastokens is not used, tokenizers encodes instead (slower): %s", difference)
    pool.start(plan.task, fast.reference, request.workers)
    return "tokenizers"


def _make_shard(plan: ShardPlan, shard_id: int, pool: EncodePool | EncodeHere, engine: str) -> ShardRecord:
    """Make a shard; its record comes last, which marks it as complete."""
    began = time.monotonic()
    finals = [plan.path(shard_id, suffix) for suffix in (".tar", ".samples", ".rejects.jsonl", ".json")]
    again = "fix it and run the same task again; nothing of this shard was committed"
    with machine_errors(finals[0], again):
        for path in finals:
            _remove_leftovers(path)
        reader = InputReader(plan.sources, plan.items(shard_id), plan.task.rules)
        temporaries = [files.temporary_name(path) for path in finals]
        try:
            with contextlib.ExitStack() as stack:
                writer = _ShardWriter(plan, reader, temporaries[:-1], stack)
                with contextlib.closing(ByteProgress(reader.total_bytes, shard_name(shard_id))) as progress:
                    for block, piece in pool.ordered(reader.blocks(f"sample_{shard_id}_")):
                        writer.add(piece, block)
                        progress.add(block.content.disk_bytes)
                record = writer.finish(shard_id, engine, began)
            files.write_json(temporaries[-1], record.to_json())
            moves = [move for move in zip(temporaries, finals, strict=True) if move[0].stat().st_size]
            for path, _ in moves:
                files.fsync_path(path)
            files.commit_all(moves, stale=[*{*finals} - {final for _, final in moves}])
        finally:
            for path in temporaries:
                path.unlink(missing_ok=True)
    LOGGER.info("%s", record.summary)
    return record


class HashedFile:
    """Writes and hashes a new file from its start to its end, and has the disk follow.

    The kernel begins to write pages as soon as there are 64 MiB, and those that are on disk are given back. So little
    is left to flush at the end, and a file of many GB doesn't fill the memory of a job, whose page cache is counted
    too. (On a virtual machine, whose host must find that memory, 5.7 GB took 3 s instead of 8 to 19.)
    """

    STEP_BYTES = 64 << 20
    WINDOW_BYTES = 512 << 20

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        """`stack` closes it."""
        self._file = stack.enter_context(path.open("wb", buffering=0))
        self._advised = 0
        self.num_bytes = 0
        self.hash = xxhash.xxh3_128()

    def write(self, data: bytes) -> None:
        """Append all of `data`."""
        self.hash.update(data)
        self.num_bytes += len(data)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        if self.num_bytes - self._advised >= self.STEP_BYTES:
            self._advised = self.num_bytes
            begin = max(0, self._advised - self.WINDOW_BYTES)
            # It begins to write what isn't on disk yet, and lets go of what is.
            os.posix_fadvise(self._file.fileno(), begin, self._advised - begin, os.POSIX_FADV_DONTNEED)


class _ShardWriter:
    """Writes a shard's tar, its table of samples and its rejected records, which `stack` closes."""

    def __init__(self, plan: ShardPlan, reader: InputReader, paths: list[Path], stack: contextlib.ExitStack) -> None:
        self._plan, self._reader = plan, reader
        tar, samples, rejects = paths
        self._tar, self._samples = HashedFile(tar, stack), HashedFile(samples, stack)
        self._rejects = stack.enter_context(rejects.open("wb"))
        self._counts = Counter(dict.fromkeys(COUNTS, 0))
        self._first_reject, self._overlaps = "", Counter[str]()

    def add(self, piece: Piece, block: ShardBlock) -> None:
        """Append a block's samples and rejected records.

        Raises DataError at a rejected record if the request says to stop there.
        """
        path = block.source.path
        is_rejected = {id(reject) for reject in piece.rejects}
        for bad in sorted(piece.rejects + piece.contaminated, key=lambda reject: reject.line):
            line = block.line_number(bad.line)
            if id(bad) in is_rejected and self._plan.request.on_error == "stop":
                raise DataError(
                    bad.found,
                    where=f"{path}:{line}",
                    action=bad.action("correct the record, or set bad ones aside with --on_error skip"),
                )
            if id(bad) in is_rejected:
                self._first_reject = self._first_reject or f"{path}:{line}: {bad.found}"
            record = {"kept": True} if bad.is_kept else {"record": bad.raw.decode(errors="backslashreplace")}
            entry = {"path": path, "line": line, "found": bad.found, **record}
            self._rejects.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        offset = self._tar.num_bytes
        for members in piece.members:
            self._tar.write(members)
        for table in piece.samples:
            table["offset"] += offset
            self._samples.write(table.tobytes())
        self._counts.update(piece.counts)
        self._overlaps.update(piece.overlaps)

    def finish(self, shard_id: int, engine: str, began: float) -> ShardRecord:
        """End the tar; gives the shard's record. Raises DataError for changed input, or too many rejected records."""
        for source in {part.source for item in self._plan.items(shard_id) for part in item.ranges}:
            self._plan.sources[source].check_unchanged()
        self._plan.request.check_rejected(
            shard_name(shard_id),
            num_records=self._counts["num_records"],
            num_written=self._counts["num_samples"],
            num_rejected=self._counts["num_rejected"],
            first=self._first_reject,
            place="with --on_error stop the first one stops the task",
        )
        if self._counts["num_samples"]:
            self._tar.write(end_of_archive(self._tar.num_bytes))
        plan, request = self._plan, self._plan.request
        return ShardRecord(
            shard_id=shard_id,
            num_shards=plan.num_shards,
            **dict[str, Any](self._counts),
            overlaps=dict(self._overlaps),
            tar_bytes=self._tar.num_bytes,
            tar_xxh3_128=self._tar.hash.hexdigest(),
            samples_xxh3_128=self._samples.hash.hexdigest(),
            ids_format=request.ids_format,
            has_text=request.has_text,
            settings=plan.settings,
            tokenizer=tokenizer_record(plan.tokenizer, engine, request.verify_tokens),
            inputs=tuple(self._reader.inputs),
            has_sample_checksums=True,
            num_files_left_out=plan.num_files_left_out,
            **made_now(time.monotonic() - began),
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
