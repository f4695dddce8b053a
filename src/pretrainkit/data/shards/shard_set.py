"""A set of token shards in a folder or behind URLs: records, tables of samples, and reading of ids."""

from __future__ import annotations

import hashlib
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from pretrainkit.data.names import SHARD_FILE
from pretrainkit.data.shards.format import SAMPLE, ShardRecord, decode_ids, read_records, sample_dtype, shard_name
from pretrainkit.data.shards.urls import ForwardStream, expand, fetch, is_url, sibling
from pretrainkit.errors import DataError, RequestError
from pretrainkit.files import hash_file

AGAIN = "run make_shards.py again with the same flags: it makes missing and damaged ones, and --status lists them"
CHECK = "find all damage with inspect_data.py verify, then copy the shards again, or make_shards.py --all --verify"
OPEN_STREAMS = 32
"""Remote shards that one process keeps open."""
KEPT_DOCUMENTS = 256
"""Decoded samples that ShardDocuments caches: a long one is asked for several times."""


@dataclass(frozen=True)
class Shard:
    """A finished shard."""

    url: str
    """Path, or anything that WebDataset opens."""
    record: ShardRecord
    table: NDArray[Any]
    """[N], dtype SAMPLE."""

    @property
    def is_local(self) -> bool:
        """Whether samples can be read in any order at no cost."""
        return not is_url(self.url)


@dataclass(frozen=True)
class ShardSet:
    """Shards made with the same settings, in order."""

    shards: tuple[Shard, ...]
    """Those that have samples."""
    records: tuple[ShardRecord, ...]

    @property
    def num_samples(self) -> int:
        """Of all shards."""
        return sum(record.num_samples for record in self.records)

    @property
    def num_tokens(self) -> int:
        """Of all shards."""
        return sum(record.num_tokens for record in self.records)

    @property
    def data_hash(self) -> str:
        """Changes when the content of the shards does, not their place."""
        content = " ".join(f"{shard.record.shard_id}:{shard.record.tar_xxh3_128}" for shard in self.shards)
        return hashlib.sha256(content.encode()).hexdigest()


def is_shard_folder(path: Path | str) -> bool:
    """Whether a folder holds token shards, finished or not."""
    path = Path(path)
    return path.is_dir() and any(SHARD_FILE.fullmatch(file.name) for file in path.glob("shard-*"))


def open_shards(urls: str | Path | list[str]) -> ShardSet:
    """The shards in a folder, or those named by a path or URL with `{00000..00009}` or `*`, or by a list of them.

    A folder must hold a complete set. Raises RequestError for missing, damaged or mixed shards.
    """
    try:
        if isinstance(urls, str | Path) and Path(urls).is_dir():
            shards = _complete_folder(Path(urls))
        else:
            names = [str(urls)] if isinstance(urls, str | Path) else urls
            shards = [_open(url) for name in names for url in expand(name)]
    except DataError as error:
        raise RequestError(error.found, where=error.where, needed=error.needed, action=error.action) from error
    records = tuple(shard.record for shard in shards)
    _check_settings(records, str(urls))
    return ShardSet(tuple(shard for shard in shards if shard.record.num_samples), records)


def _complete_folder(folder: Path) -> list[Shard]:
    records = read_records(folder)
    if not records:
        raise RequestError(
            "no finished token shard here",
            where=str(folder),
            needed="shard-*.tar with their shard-*.json",
            action="make them with tools/make_shards.py",
        )
    if missing := missing_shards(records):
        shown = ", ".join(map(shard_name, missing[:5])) + (" ..." if len(missing) > 5 else "")
        raise RequestError(
            f"{len(missing)} of {len(missing) + len(records)} shards are missing: {shown}",
            where=str(folder),
            action=AGAIN,
        )
    return [_open(str(folder / f"{shard_name(number)}.tar"), records[number]) for number in sorted(records)]


def missing_shards(records: dict[int, ShardRecord]) -> list[int]:
    """The numbers that are missing in a set of which there are some records."""
    num_shards = next(iter(records.values())).num_shards if records else 0
    return [number for number in range(num_shards) if number not in records]


def _open(url: str, record: ShardRecord | None = None) -> Shard:
    if is_url(url):
        record = ShardRecord.decode(fetch(sibling(url, ".json")), url)
        content = fetch(sibling(url, ".samples")) if record.num_samples else b""
        if len(content) != record.num_samples * sample_dtype(record).itemsize:
            raise DataError(f"its table of samples has {len(content)} bytes", where=url)
        return Shard(url, record, np.frombuffer(content, sample_dtype(record)))
    local = Path(url.removeprefix("file:"))
    record = record or ShardRecord.read(local.with_suffix(".json"))
    if record is None:
        raise DataError(
            "no finished token shard",
            where=str(local),
            needed=f"the shard with its record {local.stem}.json, or a folder of them",
            action="correct the name, or make it with tools/make_shards.py",
        )
    if damage := shard_damage(local, record):
        raise DataError(damage, where=str(local.parent), action=f"copy it again, or {AGAIN}")
    table = np.zeros(0, SAMPLE)
    if record.num_samples:
        table = np.memmap(local.with_suffix(".samples"), sample_dtype(record), "r")
    return Shard(str(local), record, table)


def shard_damage(tar: Path, record: ShardRecord, *, reads: bool = False) -> str:
    """What is wrong with a shard's files, in words; empty if nothing. Looks at sizes; with `reads` at all bytes."""
    wanted = {
        tar: (record.tar_bytes, record.tar_xxh3_128),
        tar.with_suffix(".samples"): (record.num_samples * sample_dtype(record).itemsize, record.samples_xxh3_128),
    }
    for path, (num_bytes, digest) in wanted.items() if record.num_samples else ():
        found = path.stat().st_size if path.is_file() else None
        if found is None:
            return f"{path.name} is missing"
        if found != num_bytes:
            return f"{path.name} has {found} bytes, its record says {num_bytes}"
        if reads and hash_file(path, xxhash.xxh3_128) != digest:
            return f"{path.name} holds other bytes than were written"
    return ""


def _check_settings(records: tuple[ShardRecord, ...], where: str) -> None:
    for record in records[1:]:
        first = records[0].settings
        different = [name for name in first if record.settings.get(name) != first[name]]
        if different:
            raise RequestError(
                f"{shard_name(record.shard_id)} and {shard_name(records[0].shard_id)} differ in {', '.join(different)}",
                where=where,
                needed="shards of the same set",
            )


class ShardReader:
    """Reads ids of samples. Local shards are memory-mapped; remote ones are streams that only go forward."""

    def __init__(self, shards: tuple[Shard, ...], num_kept: int) -> None:
        """`num_kept` decoded samples are cached."""
        self._shards, self._num_kept = shards, num_kept
        self._maps: dict[int, mmap.mmap] = {}
        self._streams: dict[int, ForwardStream] = {}
        """The one that was used last comes last."""
        self._kept: dict[tuple[int, int], NDArray[np.int32]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardReader, (self._shards, self._num_kept)

    def read(self, shard: int, sample: int) -> NDArray[np.int32]:
        """The ids of a sample. Raises DataError when the shard is not what its table says."""
        if (shard, sample) not in self._kept:
            self._kept[shard, sample] = self._read(shard, sample)
            if len(self._kept) > self._num_kept:
                del self._kept[next(iter(self._kept))]
        return self._kept[shard, sample]

    def _read(self, shard: int, sample: int) -> NDArray[np.int32]:
        found = self._shards[shard]
        entry = found.table[sample]
        content = self._content(shard, int(entry["offset"]), int(entry["num_bytes"]))
        if found.record.has_sample_checksums and crc32(content) != entry["crc32"]:
            raise DataError(f"sample {sample} holds other bytes than were written", where=found.url, action=CHECK)
        try:
            ids = decode_ids(content, found.record.ids_format)
        except ValueError as error:
            raise DataError(f"sample {sample}: {error}", where=found.url, action="copy the shard again") from error
        if len(ids) != entry["num_tokens"]:
            raise DataError(
                f"sample {sample} has {len(ids)} tokens, its table says {entry['num_tokens']}",
                where=found.url,
                action="copy the shard and its table again",
            )
        return ids

    def _content(self, shard: int, offset: int, num_bytes: int) -> bytes:
        found = self._shards[shard]
        if not found.is_local:
            stream = self._streams.pop(shard) if shard in self._streams else ForwardStream(found.url)
            self._streams[shard] = stream
            if len(self._streams) > OPEN_STREAMS:
                self._streams.pop(next(iter(self._streams))).close()
            return stream.read(offset, num_bytes)
        if shard not in self._maps:
            with Path(found.url).open("rb") as file:
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[shard][offset : offset + num_bytes]


class ShardDocuments:
    """A set of shards as documents, with the part of Megatron's IndexedDataset that training uses.

    Every sample is a document, in the order of the shards. Raises RequestError when the set is incomplete or damaged.
    """

    row_length = None

    def __init__(self, shards: Path | str) -> None:
        self.path_prefix = str(shards)
        found = open_shards(shards)
        if not found.num_samples:
            raise RequestError("no sample in any shard", where=str(shards))
        self.num_tokens = found.num_tokens
        self.tokenizer = found.records[0].tokenizer
        """Which gave the ids."""
        self.data_hash = found.data_hash
        """Changes when the content does, not its place."""
        self.has_eod = bool(found.records[0].settings["last_ids"])
        """Whether a token ends every document."""
        self._reader = ShardReader(found.shards, KEPT_DOCUMENTS)
        tables = [shard.table["num_tokens"] for shard in found.shards]
        self.sequence_lengths: NDArray[np.int32] = np.concatenate(tables).astype(np.int32)
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(table) for table in tables])])

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[np.int32]:
        """Ids of a document from `offset` on, `length` of them or all that follow."""
        shard = int(np.searchsorted(self._first, idx, side="right")) - 1
        ids = self._reader.read(shard, int(idx - self._first[shard]))
        return ids[offset : None if length is None else offset + length]
