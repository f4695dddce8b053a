"""One output while it is put together, under temporary names in the state folder; then its files get their names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from pretrainkit.data.decontamination.overlap import OVERLAPS
from pretrainkit.data.indexed.chunk import Chunk, Column, Target
from pretrainkit.data.indexed.file_bytes import checksum, write_at
from pretrainkit.data.indexed.format import HEADER, bin_path, write_header, write_index_tail
from pretrainkit.data.indexed.labels import LabelRecord, add_counts, label_record, labels_path
from pretrainkit.data.indexed.manifest import InputFile, Manifest, made_now, manifest_path, tokenizer_record
from pretrainkit.data.indexed.request import Plan
from pretrainkit.data.readers.source import BLOCK_BYTES, RangeCounts
from pretrainkit.errors import DataError
from pretrainkit.files import commit_all, fsync_path, hash_file, write_json


@dataclass
class SourceTotals(RangeCounts):
    """What was read of one input file so far, in order."""

    num_pieces: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)
    """Over the digests of the pieces."""

    def add(self, counts: RangeCounts) -> None:
        """Add the next range of the file."""
        names = "num_lines", "num_records", "num_blank", "num_rejected", "num_replaced", "num_contaminated", "num_bytes"
        for name in names:
            setattr(self, name, getattr(self, name) + getattr(counts, name))
        for name in ("num_tokens", "num_text_bytes", "num_spelled"):
            added = getattr(counts, name)
            earlier = getattr(self, name) or [0] * len(added)
            setattr(self, name, [a + b for a, b in zip(earlier, added, strict=True)])
        self.labels = self.labels or [{} for _ in counts.labels]
        for found, more in zip(self.labels, counts.labels, strict=True):
            add_counts(found, more)
        for name, count in counts.overlaps.items():
            self.overlaps[name] = self.overlaps.get(name, 0) + count
        self.digest.update(bytes.fromhex("".join(counts.digests)))
        self.num_pieces += len(counts.digests)


class Output:
    """The files of one output. Chunks are added to its counts in order; their data may be written later."""

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan, self._number, self._names = plan, number, plan.outputs[number]
        self._first_line = cache(plan.first_line)
        num_keys = len(self._names.prefixes)
        self._columns = [Column() for _ in range(len(plan.columns) * num_keys)]
        self._num_empty = [0] * num_keys
        self._sources: dict[int, SourceTotals] = {}
        self.rejects = Column()

    def _path(self, kind: str) -> Path:
        """Temporary name of `rejects.jsonl`, or of key K's `K.bin`, `K.idx`, `K.labels` or `K.manifest.json`."""
        return self._plan.state_folder / f"output-{self._number}.{kind}"

    def targets(self) -> list[Target]:
        """Where the columns of the next chunk belong."""
        kinds = [(k, kind) for k in range(len(self._names.prefixes)) for kind in self._plan.columns]
        return [
            (self._path(f"{k}.{kind}"), column.num_bytes + (HEADER.size if kind == "idx" else 0))
            for (k, kind), column in zip(kinds, self._columns, strict=True)
        ]

    def _columns_of(self, k: int) -> list[Column]:
        """A key's tokens, lengths, and labels if there are any."""
        return self._columns[k * len(self._plan.columns) :][: len(self._plan.columns)]

    def line_of(self, chunk: Chunk, range_number: int, line: int) -> tuple[str, int]:
        """The path and number of a line of the next chunk, which is given as counted in one of the chunk's ranges."""
        source = chunk.ranges[range_number].source
        earlier = [counts for counts in chunk.ranges[:range_number] if counts.source == source]
        if source in self._sources:
            earlier.append(self._sources[source])
        before = self._first_line(source) + sum(counts.num_lines for counts in earlier)
        return self._plan.sources[source].path, before + line + 1

    def add(self, chunk: Chunk) -> None:
        """Count the next chunk, and append its rejects."""
        if chunk.rejects.num_bytes:
            self._append_rejects(chunk)
        self._count(chunk)

    def take(self, chunk: Chunk, rejects: Column) -> bool:
        """Count the next chunk, if it is undamaged as an earlier process has placed it, and so are all rejects."""
        begin, before = self.rejects.num_bytes, self.rejects.crc32
        found = checksum(self._path("rejects.jsonl"), begin, rejects.num_bytes - begin, before)
        if found != rejects.crc32 or not chunk.is_at(self.targets()):
            return False
        self.rejects = rejects
        self._count(chunk)
        return True

    def _count(self, chunk: Chunk) -> None:
        for totals, column in zip(self._columns, chunk.columns, strict=True):
            totals.append(column)
        self._num_empty = [a + b for a, b in zip(self._num_empty, chunk.num_empty, strict=True)]
        for counts in chunk.ranges:
            self._sources.setdefault(counts.source, SourceTotals(counts.source)).add(counts)

    def _append_rejects(self, chunk: Chunk) -> None:
        entries = []
        for text in chunk.rejects_path(self._plan.state_folder).read_bytes().splitlines():
            entry = orjson.loads(text)
            path, line = self.line_of(chunk, entry.pop("range"), entry.pop("line"))
            entries.append(orjson.dumps({"file": path, "line": line, **entry}) + b"\n")
        data = b"".join(entries)
        write_at(self._path("rejects.jsonl"), self.rejects.num_bytes, [data])
        self.rejects = replace(self.rejects)  # the journal gets those of every chunk
        self.rejects.add(data)

    def flush(self) -> None:
        """Bring the tokens that were written so far to the disk."""
        for path, _ in self.targets()[:: len(self._plan.columns)]:
            fsync_path(path)

    def check_rejected(self) -> None:
        """Raises DataError when too many of the records were rejected."""
        num_rejected = sum(totals.num_rejected for totals in self._sources.values())
        if not num_rejected:
            return
        path = self._path("rejects.jsonl")
        with path.open("rb") as file:
            entries = map(orjson.loads, file)
            first = next(entry for entry in entries if not entry["found"].startswith(OVERLAPS))
        self._plan.request.check_rejected(
            self._names.prefixes[0],
            num_records=sum(totals.num_records for totals in self._sources.values()),
            num_written=sum(column.num_bytes for column in self._columns),
            num_rejected=num_rejected,
            first=f"{first['file']}:{first['line']}: {first['found']}",
            place=f"all are in {path}",
        )

    def finish(self, engine: str, elapsed_s: float) -> None:
        """Complete all files under their temporary names, flushed to disk. All data must have been written.

        Raises DataError when an input file changed since the work began.
        """
        for number in self._sources:
            self._plan.sources[number].check_unchanged()
        for k, key in enumerate(self._plan.request.json_keys):
            tokens, lengths, *labels = self._columns_of(k)
            self._finish_pair(self._path(f"{k}.bin"), tokens.num_bytes, self._path(f"{k}.idx"), lengths.num_bytes // 4)
            for column in labels:
                self._path(f"{k}.labels").touch()
                os.truncate(self._path(f"{k}.labels"), column.num_bytes)
                fsync_path(self._path(f"{k}.labels"))
            write_json(self._path(f"{k}.manifest.json"), self._manifest(k, key, engine, elapsed_s).to_json())
        if self.rejects.num_bytes:
            os.truncate(self._path("rejects.jsonl"), self.rejects.num_bytes)
            fsync_path(self._path("rejects.jsonl"))
        else:
            self._path("rejects.jsonl").unlink(missing_ok=True)

    def _finish_pair(self, tokens: Path, num_bytes: int, index: Path, num_documents: int) -> None:
        for path in (tokens, index):
            path.touch()
        os.truncate(tokens, num_bytes)
        os.truncate(index, HEADER.size + 4 * num_documents)
        lengths = np.zeros(0, dtype=np.int32)
        if num_documents:
            lengths = np.memmap(index, mode="r", dtype=np.int32, offset=HEADER.size, shape=(num_documents,))
        with index.open("r+b") as file:
            write_header(file, self._plan.dtype, num_documents, num_documents)
            file.seek(0, os.SEEK_END)
            write_index_tail(file, lengths, self._plan.dtype.itemsize)
        fsync_path(tokens)
        fsync_path(index)

    def _manifest(self, k: int, key: str, engine: str, elapsed_s: float) -> Manifest:
        plan, request = self._plan, self._plan.request
        read = {
            number: self._sources.get(number, SourceTotals(number))
            for number in self._names.sources
            if request.shard is None or number in self._sources
        }
        inputs = tuple(
            InputFile(
                plan.sources[number].path,
                plan.sources[number].num_bytes,
                self._hash(number, totals),
                totals.num_records,
                totals.num_tokens[k] if totals.num_tokens else 0,
                totals.num_text_bytes[k] if totals.num_text_bytes else 0,
            )
            for number, totals in read.items()
        )

        def total(name: str) -> int:
            return sum(getattr(totals, name) for totals in read.values())

        tokens, lengths, *labels = self._columns_of(k)
        num_tokens, num_input_bytes = tokens.num_bytes // plan.dtype.itemsize, total("num_bytes")
        return Manifest(
            key=key,
            dtype=plan.dtype.name,
            num_documents=lengths.num_bytes // 4,
            num_tokens=num_tokens,
            num_records=total("num_records"),
            num_empty=self._num_empty[k],
            num_rejected=total("num_rejected"),
            num_blank_lines=total("num_blank"),
            num_replaced=total("num_replaced"),
            num_text_bytes=sum(entry.num_text_bytes for entry in inputs),
            num_spelled=sum(totals.num_spelled[k] for totals in read.values() if totals.num_spelled),
            num_input_bytes=num_input_bytes,
            bin_bytes=tokens.num_bytes,
            bin_crc32=tokens.crc32,
            idx_xxh3_128=hash_file(self._path(f"{k}.idx"), xxhash.xxh3_128),
            append_eod=plan.tokenizer.eod_id in plan.last_ids,
            add_bos=plan.tokenizer.bos_id in plan.first_ids,
            special_tokens_in_text=request.special_tokens_in_text,
            tokenizer=tokenizer_record(plan.tokenizer, engine, request.verify_tokens),
            inputs=inputs,
            num_files_left_out=plan.num_files_left_out,
            part=self._names.part,
            labels=self._labels(k, read.values(), labels[0]) if labels else None,
            num_contaminated=total("num_contaminated"),
            decontamination=self._decontamination(read.values()),
            flags=plan.flags(),
            megabytes_per_second=round(num_input_bytes / elapsed_s / 1e6, 3),
            tokens_per_second=round(num_tokens / elapsed_s, 1),
            **made_now(elapsed_s),
        )

    def _labels(self, k: int, read: Iterable[SourceTotals], column: Column) -> LabelRecord:
        counts: dict[str, list[int]] = {}
        for totals in read:
            for found in totals.labels[k : k + 1]:
                add_counts(counts, found)
        return label_record(self._plan.request.label_key, column.crc32, counts)

    def _decontamination(self, read: Iterable[SourceTotals]) -> dict[str, Any]:
        """What was looked for, and the records that overlap with each set."""
        evaluations = self._plan.evaluations
        if evaluations is None:
            return {}
        overlaps = {name: sum(totals.overlaps.get(name, 0) for totals in read) for name in evaluations.names}
        return self._plan.decontamination | {"overlaps": overlaps}

    def _hash(self, number: int, totals: SourceTotals) -> str:
        """Empty when only a part of the file was read here."""
        num_pieces = -(-self._plan.sources[number].num_bytes // BLOCK_BYTES)
        return totals.digest.hexdigest() if totals.num_pieces == num_pieces else ""

    def commit(self) -> None:
        """Give all files their final names: tokens, index, then the manifest, the mark of completeness.

        An old output of the same name stays until here. May be called again after it was cut off. Raises DataError when
        files are missing.
        """
        prefixes, rejects = self._names.prefixes, Path(self._names.rejects)
        kinds = (*self._plan.columns, "manifest.json")
        moves = [(self._path(f"{k}.{kind}"), Path(f"{p}.{kind}")) for kind in kinds for k, p in enumerate(prefixes)]
        commit_all([*moves[:-1], (self._path("rejects.jsonl"), rejects), moves[-1]])
        if "labels" not in kinds:  # those of an output that was replaced
            for prefix in prefixes:
                labels_path(prefix).unlink(missing_ok=True)
        if not all(path.exists() for prefix in prefixes for path in (bin_path(prefix), manifest_path(prefix))):
            raise DataError(
                "this finished output was removed while others were not finished",
                where=prefixes[0],
                action="run again with --no-resume",
            )
