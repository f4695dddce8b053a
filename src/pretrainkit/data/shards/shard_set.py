"""A set of token shards in a folder or behind URLs: records, tables of samples, and reading of ids."""

from __future__ import annotations

import hashlib
import mmap
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from pretrainkit.data.indexed.manifest import TokenizerRecord
from pretrainkit.data.shards.format import (
    NAME,
    SAMPLE,
    ShardRecord,
    decode_ids,
    read_record,
    read_records,
    record_from_json,
    shard_name,
)
from pretrainkit.data.shards.urls import expand, fetch, is_url, sibling
from pretrainkit.errors import DataError, RequestError

OPEN_STREAMS = 32
"""Remote shards that one process keeps open."""
KEPT_SAMPLES = 256
"""Decoded samples that ShardDocuments keeps: a long one is asked for several times."""
RETRIES = 3
"""Attempts to read from a remote stream."""


@dataclass(frozen=True)
class Shard:
    """A finished shard with samples."""

    url: str
    """Path, or anything that WebDataset opens."""
    record: ShardRecord
    table: NDArray[Any]
    """[N], dtype SAMPLE."""
    is_local: bool


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
    return path.is_dir() and any(NAME.fullmatch(file.name) for file in path.glob("shard-*"))


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
    records = tuple(record for record, _ in shards)
    _check_settings(records, str(urls))
    return ShardSet(tuple(shard for _, shard in shards if shard is not None), records)


def _complete_folder(folder: Path) -> list[tuple[ShardRecord, Shard | None]]:
    records = read_records(folder)
    if not records:
        raise RequestError(
            "no finished token shard here",
            where=str(folder),
            needed="shard-*.tar with their shard-*.json",
            action="make them with tools/make_shards.py",
        )
    num_shards = next(iter(records.values())).num_shards
    missing = [number for number in range(num_shards) if number not in records]
    if missing:
        shown = ", ".join(map(shard_name, missing[:5])) + (" ..." if len(missing) > 5 else "")
        raise RequestError(
            f"{len(missing)} of {num_shards} shards are missing: {shown}",
            where=str(folder),
            action="run make_shards.py again with the same flags: it makes those, and --status lists them",
        )
    return [_open(str(folder / f"{shard_name(number)}.tar"), records[number]) for number in sorted(records)]


def _open(url: str, record: ShardRecord | None = None) -> tuple[ShardRecord, Shard | None]:
    if not is_url(url):
        local = Path(url.removeprefix("file:"))
        if record is None and not local.with_suffix(".json").is_file():
            raise DataError(
                "no finished token shard",
                where=str(local),
                needed=f"the shard with its record {local.stem}.json, or a folder of them",
                action="correct the name, or make it with tools/make_shards.py",
            )
        record = record or read_record(local.with_suffix(".json"))
        if not record.num_samples:
            return record, None
        table = _local_file(local.with_suffix(".samples"), record.num_samples * SAMPLE.itemsize)
        _local_file(local, record.tar_bytes)
        return record, Shard(str(local), record, np.memmap(table, SAMPLE, "r"), is_local=True)
    record = record_from_json(orjson.loads(fetch(sibling(url, ".json"))), url)
    if not record.num_samples:
        return record, None
    table_bytes = fetch(sibling(url, ".samples"))
    if len(table_bytes) != record.num_samples * SAMPLE.itemsize:
        raise DataError(f"its table of samples has {len(table_bytes)} bytes", where=url)
    return record, Shard(url, record, np.frombuffer(table_bytes, SAMPLE), is_local=False)


def _local_file(path: Path, num_bytes: int) -> Path:
    found = path.stat().st_size if path.is_file() else None
    if found != num_bytes:
        raise DataError(
            "missing" if found is None else f"{found} bytes, its record says {num_bytes}",
            where=str(path),
            action="copy it again, or remove its .json and run make_shards.py again",
        )
    return path


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

    def __init__(self, shards: tuple[Shard, ...]) -> None:
        self._shards = shards
        self._maps: dict[int, mmap.mmap] = {}
        self._streams: OrderedDict[int, tuple[Any, int]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_shards": self._shards, "_maps": {}, "_streams": OrderedDict()}

    def is_local(self, shard: int) -> bool:
        """Whether samples of a shard can be read in any order at no cost."""
        return self._shards[shard].is_local

    def read(self, shard: int, sample: int) -> NDArray[np.int32]:
        """The ids of a sample. Raises DataError when the shard is not what its table says."""
        found = self._shards[shard]
        entry = found.table[sample]
        offset, num_bytes = int(entry["offset"]), int(entry["num_bytes"])
        content = (
            self._mapped(shard)[offset : offset + num_bytes] if found.is_local else self._next(shard, offset, num_bytes)
        )
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

    def _mapped(self, shard: int) -> mmap.mmap:
        if shard not in self._maps:
            with Path(self._shards[shard].url).open("rb") as file:
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[shard]

    def _next(self, shard: int, offset: int, num_bytes: int) -> bytes:
        error: Exception | None = None
        for _ in range(RETRIES):
            try:
                stream, position = self._stream(shard, offset)
                _skip(stream, offset - position)
                content = stream.read(num_bytes)
                if len(content) != num_bytes:
                    raise EOFError(f"the stream ends at byte {offset + len(content)}")
                self._streams[shard] = stream, offset + num_bytes
                return content
            except Exception as found:  # each URL scheme has its own error types
                error = found
                self._close(shard)
        raise DataError(f"can't be read: {error}", where=self._shards[shard].url) from error

    def _stream(self, shard: int, offset: int) -> tuple[Any, int]:
        if shard in self._streams and self._streams[shard][1] > offset:
            self._close(shard)
        if shard not in self._streams:
            from webdataset.gopen import gopen

            while len(self._streams) >= OPEN_STREAMS:
                self._close(next(iter(self._streams)))
            self._streams[shard] = gopen(self._shards[shard].url, "rb"), 0
        self._streams.move_to_end(shard)
        return self._streams[shard]

    def _close(self, shard: int) -> None:
        if shard in self._streams:
            stream, _ = self._streams.pop(shard)
            _close_early(stream)


def _skip(stream: Any, num_bytes: int) -> None:
    while num_bytes:
        data = stream.read(min(num_bytes, 1 << 20))
        if not data:
            raise EOFError("the stream ends early")
        num_bytes -= len(data)


def _close_early(stream: Any) -> None:
    """Close a stream that was not read to its end; the program behind it then ends by SIGPIPE, as it should."""
    try:
        stream.close()
    except Exception:  # the program reports its closed pipe
        return


class ShardDocuments:
    """A set of shards as documents, with the part of Megatron's IndexedDataset that training uses.

    Every sample is a document, in the order of the shards. Raises RequestError when the set is incomplete or damaged.
    """

    row_length = None

    def __init__(self, shards: str) -> None:
        self.path_prefix = shards
        self._set = open_shards(shards)
        if not self._set.num_samples:
            raise RequestError("no sample in any shard", where=shards)
        self._reader = ShardReader(self._set.shards)
        tables = [shard.table["num_tokens"] for shard in self._set.shards]
        self.sequence_lengths: NDArray[np.int32] = np.concatenate(tables).astype(np.int32)
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(table) for table in tables])])
        self._kept: OrderedDict[int, NDArray[np.int32]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return self._set.num_tokens

    @property
    def tokenizer(self) -> TokenizerRecord:
        """Which tokenizer gave the ids."""
        return self._set.records[0].tokenizer

    @property
    def data_hash(self) -> str:
        """Changes when the content does, not its place."""
        return self._set.data_hash

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[np.int32]:
        """Ids of a document from `offset` on, `length` of them or all that follow."""
        number = int(idx)
        ids = self._kept.get(number)
        if ids is None:
            shard = int(np.searchsorted(self._first, number, side="right")) - 1
            ids = self._kept[number] = self._reader.read(shard, number - int(self._first[shard]))
            if len(self._kept) > KEPT_SAMPLES:
                self._kept.popitem(last=False)
        return ids[offset : None if length is None else offset + length]
