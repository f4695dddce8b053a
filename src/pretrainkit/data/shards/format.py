"""What lies beside a token shard: `shard-00003.json`, its record and commit mark, and `shard-00003.samples`.

`.samples` has 16 bytes for each sample, little-endian, in the order of the tar:

    bytes  type    field
    0-7    int64   offset of the ids' content in the tar
    8-11   int32   number of bytes of that content
    12-15  int32   number of tokens
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretrainkit.data.indexed.manifest import TokenizerRecord, decode_record
from pretrainkit.errors import DataError
from pretrainkit.files import read_json

FORMAT = "pretrainkit-shard-1"
NAME = re.compile(r"shard-\d{5}\.(tar|json)")
SAMPLE = np.dtype([("offset", "<i8"), ("num_bytes", "<i4"), ("num_tokens", "<i4")])


@dataclass(frozen=True)
class ShardInput:
    """A file, or a part of one, that a shard was made from."""

    path: str
    num_bytes: int
    """Of the whole file, on disk."""
    modified_ns: int
    num_bytes_read: int
    """Decompressed, of the part that went into this shard."""
    xxh3_128: str
    """Over the XXH3-128 digests of the pieces that were read."""


@dataclass(frozen=True)
class ShardRecord:
    """A shard's record. in = out + empty + rejected."""

    shard_id: int
    num_shards: int
    num_samples: int
    num_tokens: int
    num_records: int
    num_empty: int
    """Records without a token; not written."""
    num_rejected: int
    num_blank_lines: int
    num_replaced: int
    num_text_bytes: int
    """Of the samples' texts, UTF-8."""
    tar_bytes: int
    """0: no sample, and no tar."""
    tar_xxh3_128: str
    samples_xxh3_128: str
    ids_format: str
    """`json`, `npy` or `msgpack`."""
    has_text: bool
    settings: dict[str, Any]
    """What must be equal in all shards of a set."""
    tokenizer: TokenizerRecord
    inputs: tuple[ShardInput, ...]
    elapsed_s: float = 0.0
    finished_at: str = ""
    pretrainkit_version: str = ""
    notes: tuple[str, ...] = field(default=())


def shard_name(shard_id: int) -> str:
    """`shard-00003`."""
    return f"shard-{shard_id:05d}"


def record_to_json(record: ShardRecord) -> dict[str, Any]:
    """For the file beside the shard."""
    return {"format": FORMAT, **asdict(record)}


def record_from_json(value: Any, where: str) -> ShardRecord:
    """The record in a parsed file. Raises DataError."""
    try:
        return decode_record(ShardRecord, value, FORMAT)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"not a readable record of a shard: {error}", where=where) from error


def read_record(path: Path) -> ShardRecord:
    """Read `shard-*.json`. Raises DataError."""
    try:
        value = read_json(path)
    except (ValueError, OSError) as error:
        raise DataError(f"not a readable record of a shard: {error}", where=str(path)) from error
    return record_from_json(value, str(path))


def read_records(folder: Path) -> dict[int, ShardRecord]:
    """The records of all finished shards in a folder, by shard."""
    records = {}
    for path in sorted(folder.glob("shard-*.json")):
        if not NAME.fullmatch(path.name):
            continue
        record = read_record(path)
        records[record.shard_id] = record
    return records
