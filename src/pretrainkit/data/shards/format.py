"""The format of a token shard: `shard-00003.tar`, `shard-00003.samples`, and `shard-00003.json`, its record.

The record is written last, so it also marks the shard as complete. The tar holds samples byte for byte as
WebDataset's TarWriter writes them with `mtime=0`. A member is a USTAR header of 512 bytes and its content, filled
up with zeros to a multiple of 512:

    offset  bytes  field
    0       100    name: `<key>.<extension>`
    124     12     size, octal
    148     8      checksum: sum of the header's bytes with this field as spaces, octal

The other fields are the same for all members (mode 0444, user and group `bigdata`), so headers are made for
many samples at once. Members of a sample are in the order of their extensions, as the writer sorts them.

`.samples` has 20 bytes for each sample, little-endian, in the order of the tar:

    bytes  type    field
    0-7    int64   offset of the ids' content in the tar
    8-11   int32   number of bytes of that content
    12-15  int32   number of tokens
    16-19  uint32  CRC-32 of that content; not there in shards of older versions
"""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from pretrainkit.data.indexed.manifest import (
    DataRecord,
    TokenizerRecord,
    contaminated_note,
    overlaps_note,
    spelled_note,
)
from pretrainkit.data.names import SHARD_FILE
from pretrainkit.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    import pyarrow as pa

OLD_SAMPLE = np.dtype([("offset", "<i8"), ("num_bytes", "<i4"), ("num_tokens", "<i4")])
SAMPLE = np.dtype([*OLD_SAMPLE.descr, ("crc32", "<u4")])
BLOCK = tarfile.BLOCKSIZE
COUNTS = (
    *("num_samples", "num_tokens", "num_records", "num_empty", "num_rejected"),
    *("num_blank_lines", "num_replaced", "num_spelled", "num_contaminated", "num_text_bytes"),
)
"""Fields of a record that are sums over its pieces."""
MAX_TABLE = 1 << 20
"""Largest number whose text is looked up; larger vocabularies are rare, and their table would be large too."""
_PADDING = [bytes(count) for count in range(BLOCK)]
_NAME, _SIZE, _CHECKSUM = 0, 124, 148


@dataclass(frozen=True)
class ShardInput:
    """A file, or a part of one, that a shard was made from."""

    path: str
    num_bytes: int
    """Size of the file on disk, all of it."""
    modified_ns: int
    num_bytes_read: int
    """Decompressed, of the part that went into this shard."""
    xxh3_128: str
    """Over the XXH3-128 digests of the pieces that were read."""


@dataclass(frozen=True)
class ShardRecord(DataRecord):
    """A shard's record, `shard-*.json`. in = out + empty + rejected + contaminated."""

    FORMAT = "pretrainkit-shard-1"
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
    """0: there are no samples, and no tar."""
    tar_xxh3_128: str
    samples_xxh3_128: str
    ids_format: str
    """`json`, `npy` or `msgpack`."""
    has_text: bool
    settings: dict[str, Any]
    """What must be equal in all shards of a set."""
    tokenizer: TokenizerRecord
    inputs: tuple[ShardInput, ...]
    has_sample_checksums: bool = False
    """Whether `.samples` has a CRC-32 for each sample."""
    num_files_left_out: int = 0
    """Files and `_*` folders in input folders that were not read, as they have no known suffix."""
    num_spelled: int = 0
    """Records whose text spells a special token."""
    num_contaminated: int = 0
    """Records left out, as they overlap with an evaluation set."""
    overlaps: dict[str, int] = field(default_factory=dict)
    """Records that overlap with each evaluation set, left out or not."""
    elapsed_s: float = 0.0
    finished_at: str = ""
    pretrainkit_version: str = ""
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line: counts, size and time."""
        return (
            f"{shard_name(self.shard_id)}: {self.num_records} records in = {self.num_samples} samples +"
            f" {self.num_empty} empty + {self.num_rejected} rejected{contaminated_note(self.num_contaminated)};"
            f" {format_count(self.num_tokens)} tokens"
            f" ({self.num_tokens}), {format_bytes(self.tar_bytes)}, {format_duration(self.elapsed_s)},"
            f" {self.tokenizer.engine}{spelled_note(self.num_spelled, self.settings['special_tokens_in_text'])}"
            f"{overlaps_note(self.settings.get('decontamination', {}), self.overlaps)}"
        )


def shard_name(shard_id: int) -> str:
    """`shard-00003`."""
    return f"shard-{shard_id:05d}"


def sample_dtype(record: ShardRecord) -> np.dtype:
    """Of the entries of its table of samples."""
    return SAMPLE if record.has_sample_checksums else OLD_SAMPLE


def read_records(folder: Path) -> dict[int, ShardRecord]:
    """The records of all finished shards in a folder, by shard."""
    paths = sorted(path for path in folder.glob("shard-*.json") if SHARD_FILE.fullmatch(path.name))
    return {record.shard_id: record for record in map(ShardRecord.read, paths) if record}


def end_of_archive(num_bytes: int) -> bytes:
    """What ends a tar whose members have `num_bytes`: two empty blocks, padded to a full tar record."""
    total = num_bytes + 2 * BLOCK
    return bytes(2 * BLOCK + -total % tarfile.RECORDSIZE)


def _json(ids: list[NDArray[np.int32]]) -> list[bytes]:
    """As the json package writes them. The texts of all numbers are looked up at once: half the time of a dump for each
    sample."""
    import pyarrow as pa

    if not ids:
        return []
    all_ids = np.concatenate(ids)
    largest = int(all_ids.max(initial=0))
    if largest >= MAX_TABLE:
        return [orjson.dumps(some, option=orjson.OPT_SERIALIZE_NUMPY).replace(b",", b", ") for some in ids]
    _, text_ends, text = _numbers(largest.bit_length()).take(pa.array(all_ids)).buffers()
    ends = np.frombuffer(text_ends, np.int64)[np.cumsum([0, *map(len, ids)])].tolist()
    characters = memoryview(text)
    spans = ((begin, max(begin, end - len(", "))) for begin, end in itertools.pairwise(ends))
    return [b"".join((b"[", characters[begin:end], b"]")) for begin, end in spans]


@lru_cache(maxsize=2)
def _numbers(num_bits: int) -> pa.LargeBinaryArray:
    """The text of all numbers of so many bits, each with `, ` after it."""
    import pyarrow as pa

    return pa.array([b"%d, " % number for number in range(2**num_bits)], pa.large_binary())


@lru_cache(maxsize=1 << 14)
def _npy_header(num_tokens: int) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.zeros(num_tokens, np.int32))
    return stream.getvalue()[: -4 * num_tokens or None]


def _npy(ids: list[NDArray[np.int32]]) -> list[bytes]:
    return [_npy_header(len(some)) + some.tobytes() for some in ids]


def _msgpack(ids: list[NDArray[np.int32]]) -> list[bytes]:
    import msgpack

    return [msgpack.packb(some.tolist()) for some in ids]


_ENCODE: dict[str, Callable[[list[NDArray[np.int32]]], list[bytes]]] = {"json": _json, "npy": _npy, "msgpack": _msgpack}


def decode_ids(content: bytes | memoryview, kind: str) -> NDArray[np.int32]:
    """The ids of a `token_ids` member; `kind` is `json`, `npy` or `msgpack`. ValueError if it is none."""
    if kind == "json":
        return np.array(orjson.loads(content), dtype=np.int32)
    if kind == "npy":
        return np.load(io.BytesIO(content), allow_pickle=False)
    import msgpack

    return np.array(msgpack.unpackb(content), dtype=np.int32)


def pack_samples(
    prefix: str, lines: NDArray[np.int64], ids: list[NDArray[np.int32]], texts: list[bytes] | None, kind: str
) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64], NDArray[np.uint32]]:
    """Samples `<prefix><line:08d>` as tar members.

    Args:
        prefix: first part of every key.
        lines: [N], ascending.
        ids: token ids of each sample.
        texts: UTF-8 text of each sample; None leaves `text.txt` out.
        kind: form of the ids: `json`, `npy` or `msgpack`.

    Returns:
        The members, and for each sample the offset in them, the number of bytes and the CRC-32 of its ids.
    """
    columns: list[Sequence[bytes]] = []
    spans: NDArray[np.int64] = np.zeros(len(lines), np.int64)
    members = [("text.txt", texts)] if texts is not None else []
    for extension, contents in (*members, (f"token_ids.{kind}", _ENCODE[kind](ids))):
        sizes = np.fromiter(map(len, contents), np.int64, len(contents))
        padding = [_PADDING[-len(content) % BLOCK] for content in contents]
        columns += (_headers(prefix, lines, extension, sizes), contents, padding)
        spans += BLOCK + _padded(sizes)
    checksums = np.fromiter(map(crc32, contents), np.uint32, len(contents))
    joined = b"".join(itertools.chain.from_iterable(zip(*columns, strict=True)))
    return joined, np.cumsum(spans) - _padded(sizes), sizes, checksums


def _padded(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-sizes // BLOCK) * BLOCK


def _headers(prefix: str, lines: NDArray[np.int64], extension: str, sizes: NDArray[np.int64]) -> list[bytes]:
    """USTAR headers of members `<prefix><line:08d>.<extension>`."""
    width = max(8, len(str(int(lines[-1])))) if len(lines) else 8
    if len(lines) and max(8, len(str(int(lines[0])))) != width:
        split = int(np.searchsorted(lines, 10 ** (width - 1)))
        return _headers(prefix, lines[:split], extension, sizes[:split]) + _headers(
            prefix, lines[split:], extension, sizes[split:]
        )
    headers = np.tile(_template(prefix, width, extension), (len(lines), 1))
    number_at = _NAME + len(prefix.encode())
    headers[:, number_at : number_at + width] = _digits(lines, 10, width)
    headers[:, _SIZE : _SIZE + 11] = _digits(sizes, 8, 11)
    checksums = headers.sum(axis=1, dtype=np.int64)
    headers[:, _CHECKSUM : _CHECKSUM + 6] = _digits(checksums, 8, 6)
    headers[:, _CHECKSUM + 6] = 0
    flat = headers.tobytes()
    return [flat[begin : begin + BLOCK] for begin in range(0, len(flat), BLOCK)]


@lru_cache(maxsize=16)
def _template(prefix: str, width: int, extension: str) -> NDArray[np.uint8]:
    """A header with zeros for the number, and spaces for the checksum."""
    info = tarfile.TarInfo(f"{prefix}{'0' * width}.{extension}")
    info.mode, info.uname, info.gname = 0o444, "bigdata", "bigdata"
    header = np.frombuffer(info.tobuf(tarfile.USTAR_FORMAT), np.uint8).copy()
    header[_CHECKSUM : _CHECKSUM + 8] = ord(" ")
    return header


def _digits(values: NDArray[np.int64], base: int, width: int) -> NDArray[np.uint8]:
    """[N, width] ASCII digits, with leading zeros."""
    powers = base ** np.arange(width - 1, -1, -1, dtype=np.int64)
    return (values[:, None] // powers % base + ord("0")).astype(np.uint8)
