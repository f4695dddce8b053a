"""What --dataset_path means, decided here alone: .bin/.idx pairs, token shards, packed datasets and blends of them.

`read_dataset` reads what is known of a dataset before a run starts, from indexes and manifests alone; `open_documents`
opens one part of it for training. So all that follows (split, order of samples, one epoch, resume) is the same for
every format, and the same documents give the same training.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pretrainkit import files
from pretrainkit.config.schema import DatasetFacts
from pretrainkit.config.split import parse_split, split_bounds
from pretrainkit.data.indexed.blend import read_blend
from pretrainkit.data.indexed.format import IndexedDataset, bin_path, idx_path
from pretrainkit.data.indexed.manifest import Manifest, read_manifest
from pretrainkit.data.indexed.pairs import find_pairs
from pretrainkit.data.indexed.verify import eod_problem
from pretrainkit.data.packed.format import PackedDocuments, PackedRows, is_packed_folder, open_packed
from pretrainkit.data.shards.shard_set import ShardDocuments, is_shard_folder
from pretrainkit.data.shards.urls import is_url, names_shards
from pretrainkit.errors import DataError, RequestError

_EDGE_BYTES = 1 << 20
"""Bytes hashed at either end of a .bin that has no manifest: enough to distinguish two files, never slow."""
_EOD_DOCUMENTS = 200
"""Documents, evenly spread, whose end is checked: one read each, so few."""


class DatasetKind(enum.Enum):
    """The formats that training reads."""

    INDEXED = "a .bin/.idx pair, or a folder of them"
    SHARDS = "token shards: a folder, or their names"
    PACKED = "a packed dataset: a folder"


def kind_of(path: Path | str) -> DatasetKind:
    """What one path of --dataset_path means. Raises RequestError for a folder that holds two kinds."""
    if names_shards(path):
        return DatasetKind.SHARDS
    kind = DatasetKind.PACKED if is_packed_folder(path) else DatasetKind.SHARDS if is_shard_folder(path) else None
    if kind is None:
        return DatasetKind.INDEXED
    if any(Path(path).glob("*.idx")):
        raise RequestError(
            "both .bin/.idx pairs and token shards or a packed dataset are here",
            where=str(path),
            action="keep them in separate folders, or name the pairs by their prefixes",
        )
    return kind


def open_documents(path: Path | str) -> ShardDocuments | PackedDocuments | PackedRows:
    """Token shards or a packed dataset for training. Raises RequestError when they are incomplete or damaged.

    Megatron's own IndexedDataset opens pairs.
    """
    return open_packed(path) if kind_of(path) is DatasetKind.PACKED else ShardDocuments(str(path))


@dataclass(frozen=True)
class DatasetReading:
    """A dataset's facts, and those of each prefix that the checks of a run need."""

    facts: DatasetFacts
    split_tokens: tuple[tuple[int, int, int], ...] | None
    """Per prefix, tokens of training, validation and test; None when the split can't be read. Of rows as many as make
    a sample of each row."""
    tokenizers: tuple[str | None, ...]
    """Per prefix, SHA-256 of the tokenizer.json that made it."""


def read_dataset(dataset_path: str, split: str) -> DatasetReading:
    """Read all that is known about a dataset.

    Args:
        dataset_path: a .bin/.idx prefix, a folder of them, a folder of token shards or a packed dataset, names of
            shards (paths or URLs, with `{00000..00009}`), 'weight path weight path ...' of such, or a file that
            `inspect_data.py blend` wrote.
        split: shares such as '969,30,1'.

    Raises:
        RequestError: no complete pair there, damaged files, wrong weights, a prefix named twice, data that changed
            since its blend file was written.
    """
    parts = [part for weight, path in _parse_blend(dataset_path) for part in _weighted_parts(weight, path)]
    prefixes = [prefix for prefix, _ in parts]
    if twice := sorted({str(prefix) for prefix in prefixes if prefixes.count(prefix) > 1}):
        raise RequestError(
            f"named twice: {', '.join(twice)}",
            action="name it once, with its weights added",
            where="--dataset_path",
        )
    readings = [_read_part(prefix, split) for prefix in prefixes]
    # Megatron gives a blend without weights one epoch and no more; the numbers of tokens mean the same mixture.
    weights = [
        float(reading.num_tokens) if weight is None else weight
        for reading, (_, weight) in zip(readings, parts, strict=True)
    ]
    largest_ids = [reading.largest_id for reading in readings if reading.largest_id is not None]
    splits = [reading.split_tokens for reading in readings]
    digest = hashlib.sha256("".join(reading.digest for reading in readings).encode())
    return DatasetReading(
        facts=DatasetFacts(
            prefixes=tuple(str(prefix) for prefix in prefixes),
            weights=tuple(weights) if len(prefixes) > 1 else (),
            num_tokens=sum(reading.num_tokens for reading in readings),
            num_documents=sum(reading.num_documents for reading in readings),
            max_token_id=max(largest_ids, default=None),
            data_hash=digest.hexdigest(),
            row_length=_row_length(readings),
        ),
        split_tokens=tuple(tokens for tokens in splits if tokens) if all(splits) else None,
        tokenizers=tuple(reading.tokenizer_sha256 for reading in readings),
    )


def _row_length(readings: list[_PartReading]) -> int | None:
    lengths = {reading.row_length for reading in readings if reading.row_length is not None}
    if len(lengths) > 1:
        raise RequestError(
            f"sets packed by bestfit into rows of {' and '.join(map(str, sorted(lengths)))} tokens",
            needed="rows of one length",
            action="pack them again with the same --sequence_length",
            where="--dataset_path",
        )
    return lengths.pop() if lengths else None


def _parse_blend(dataset_path: str) -> list[tuple[float | None, str]]:
    """(weight, path) of each part of a blend; one part without a weight when it is a single path."""
    if is_url(dataset_path):  # a pipe's command has words, too
        return [(None, dataset_path)]
    plain = Path(dataset_path).expanduser()
    if plain.is_file() and plain.suffix not in (".bin", ".idx", ".tar"):
        return [(entry.weight, entry.prefix) for entry in read_blend(plain)]
    words = shlex.split(dataset_path)
    if plain.exists() or idx_path(plain).exists() or bin_path(plain).exists() or len(words) < 2:
        return [(None, str(plain))]
    needed = "'weight prefix weight prefix ...', each weight above 0"
    if len(words) % 2:
        raise RequestError(f"{dataset_path!r}", needed=f"a prefix, a folder, or {needed}", where="--dataset_path")
    parts: list[tuple[float | None, str]] = []
    for word, path in zip(words[::2], words[1::2], strict=True):
        try:
            weight = float(word)
        except ValueError:
            raise RequestError(f"{word!r} is not a weight", needed=needed, where="--dataset_path") from None
        if not math.isfinite(weight) or weight <= 0:
            raise RequestError(f"weight {word} of {path}", needed=needed, where="--dataset_path")
        parts.append((weight, path if is_url(path) else str(Path(path).expanduser())))
    return parts


def _weighted_parts(weight: float | None, path: str) -> list[tuple[Path | str, float | None]]:
    """The prefixes at a path, with their parts of the path's weight, in proportion to their tokens."""
    kind = kind_of(path)
    if names_shards(path):
        return [(path if is_url(path) else str(Path(path.removeprefix("file:")).absolute()), weight)]
    if kind is not DatasetKind.INDEXED:
        return [(Path(path).resolve(), weight)]
    prefixes = [prefix.resolve() for prefix in find_pairs(path)]
    if weight is None or len(prefixes) == 1:
        return [(prefix, weight) for prefix in prefixes]
    sizes = [bin_path(prefix).stat().st_size for prefix in prefixes]
    total = sum(sizes) or 1
    return [(prefix, weight * size / total) for prefix, size in zip(prefixes, sizes, strict=True)]


@dataclass(frozen=True)
class _PartReading:
    num_tokens: int
    num_documents: int
    split_tokens: tuple[int, int, int] | None
    largest_id: int | None
    tokenizer_sha256: str | None
    digest: str
    row_length: int | None = None


def _read_part(path: Path | str, split: str) -> _PartReading:
    if kind_of(path) is DatasetKind.INDEXED:
        return _read_pair(path, split)
    documents = open_documents(path)
    split_tokens = _split_tokens(documents.sequence_lengths, split)
    if documents.row_length is not None and split_tokens is not None:
        # Samples out of a stream need a token more than they have, the label of their last; rows don't.
        split_tokens = (split_tokens[0] + 1, split_tokens[1] + 1, split_tokens[2] + 1)
    return _PartReading(
        num_tokens=documents.num_tokens,
        num_documents=len(documents),
        split_tokens=split_tokens,
        largest_id=documents.tokenizer.largest_id,
        tokenizer_sha256=documents.tokenizer.sha256,
        digest=documents.data_hash,
        row_length=documents.row_length,
    )


def _read_pair(prefix: Path | str, split: str) -> _PartReading:
    try:
        dataset = IndexedDataset(prefix)
        manifest = read_manifest(prefix)
    except DataError as error:
        raise RequestError(error.found, where=error.where, needed=error.needed, action=error.action) from error
    if manifest:
        _check_manifest(prefix, dataset, manifest)
    return _PartReading(
        num_tokens=dataset.num_tokens,
        num_documents=dataset.num_documents,
        split_tokens=_split_tokens(dataset.sequence_lengths, split),
        largest_id=manifest.tokenizer.largest_id if manifest else None,
        tokenizer_sha256=manifest.tokenizer.sha256 if manifest else None,
        digest=_manifest_digest(manifest) if manifest else _files_digest(prefix),
    )


def _check_manifest(prefix: Path | str, dataset: IndexedDataset, manifest: Manifest) -> None:
    recorded = manifest.num_documents, manifest.bin_bytes, manifest.dtype
    found = dataset.num_documents, bin_path(prefix).stat().st_size, dataset.dtype.name
    if recorded != found:
        raise RequestError(
            "its manifest says {} documents, {} bytes and {}, the pair has {}, {} and {}".format(*recorded, *found),
            action="the manifest is of other data: preprocess again, or copy all three files",
            where=str(prefix),
        )
    if manifest.append_eod and dataset.num_sequences:
        numbers = np.linspace(0, dataset.num_sequences - 1, _EOD_DOCUMENTS, dtype=np.int64)
        if problem := eod_problem(dataset, manifest, numbers):
            raise RequestError(
                problem,
                needed="exactly one EOD at the end of every document, as the manifest says",
                action="look at it with inspect_data.py verify, and preprocess again",
                where=str(prefix),
            )


def _split_tokens(lengths: NDArray[np.int32], split: str) -> tuple[int, int, int] | None:
    try:
        shares = parse_split(split)
    except RequestError:  # reported by the checks of the request
        return None
    bounds = split_bounds(shares, len(lengths))
    training, validation, test = (
        int(lengths[begin:end].sum(dtype=np.int64)) for begin, end in itertools.pairwise(bounds)
    )
    return (training, validation, test)


def _manifest_digest(manifest: Manifest) -> str:
    """Changes when the content of a pair does, not with its path or the number of times it was made."""
    content = f"{manifest.bin_bytes} {manifest.bin_crc32} {manifest.num_documents} {manifest.tokenizer.sha256}"
    return hashlib.sha256(content.encode()).hexdigest()


def _files_digest(prefix: Path | str) -> str:
    """The same for a pair without a manifest: of its index, and the ends of its tokens."""
    digest = hashlib.sha256(files.sha256_file(idx_path(prefix)).encode())
    with bin_path(prefix).open("rb") as tokens:
        digest.update(tokens.read(_EDGE_BYTES))
        size = tokens.seek(0, 2)
        tokens.seek(max(0, size - _EDGE_BYTES))
        digest.update(tokens.read(_EDGE_BYTES))
    return digest.hexdigest()
