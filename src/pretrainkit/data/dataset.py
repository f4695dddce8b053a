"""What --dataset_path means, decided here alone: .bin/.idx pairs, token shards, packed datasets and blends of them.

`read_dataset` reads what is known of a dataset before a run starts, from indexes and manifests alone; `dataset_path`
takes the text apart, `documents` says what opens one part for training. So all that follows (split, order of samples,
one epoch, resume) is the same for every format, and the same documents give the same training.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pretrainkit import files
from pretrainkit.config.schema import DatasetFacts
from pretrainkit.config.split import parse_split, split_bounds
from pretrainkit.data.dataset_path import blend_changes, parse_blend, part_names, weighted_parts
from pretrainkit.data.documents import document_labels, documents_kind
from pretrainkit.data.indexed.format import IndexedDataset, bin_path, idx_path
from pretrainkit.data.indexed.labels import (
    MAX_LABELS,
)
from pretrainkit.data.indexed.manifest import Manifest, TokenizerRecord, read_manifest
from pretrainkit.data.indexed.verify import eod_problem, last_token
from pretrainkit.data.packed.format import PackedDocuments
from pretrainkit.data.shards.urls import is_url
from pretrainkit.errors import DataError, RequestError

_EDGE_BYTES = 1 << 20
"""Bytes hashed at either end of a .bin that has no manifest: enough to distinguish two files, never slow."""
_DATA_WINDOWS = 4096
"""Windows of 4 KiB that are sampled of all tokens at each start (16 MiB)."""
_EOD_DOCUMENTS = 200
"""Documents, evenly spread, whose end is checked: one read each, so few."""


@dataclass(frozen=True)
class DatasetReading:
    """A dataset's facts, and those of each prefix that the checks of a run need."""

    facts: DatasetFacts
    split_tokens: tuple[tuple[int, int, int], ...] | None
    """Per prefix, tokens of training, validation and test; None when the split can't be read. Of rows as many as make
    a sample of each row."""
    tokenizers: tuple[str | None, ...]
    """Per prefix, SHA-256 of the tokenizer.json that made it."""
    without_eod: tuple[str, ...]
    """Prefixes whose documents end with no token of their own."""


def read_dataset(dataset_path: str, split: str, blend_schedule: str | None = None) -> DatasetReading:
    """Read all that is known about a dataset.

    Args:
        dataset_path: a .bin/.idx prefix, a folder of them, a folder of token shards or a packed dataset, names of
            shards (paths or URLs, with `{00000..00009}`), 'weight path weight path ...' of such, or a file that
            `inspect_data.py blend` wrote.
        split: shares such as '969,30,1'.
        blend_schedule: as --blend_schedule has it, or None.

    Raises:
        RequestError: no complete pair there, damaged files, wrong weights, a prefix named twice, data that changed
            since its blend file was written.
    """
    blend = parse_blend(dataset_path)
    parts = [(*part, number) for number, (weight, path, _) in enumerate(blend) for part in weighted_parts(weight, path)]
    prefixes = [prefix for prefix, *_ in parts]
    if twice := sorted({str(prefix) for prefix in prefixes if prefixes.count(prefix) > 1}):
        raise RequestError(
            f"named twice: {', '.join(twice)}",
            action="name it once, with its weights added",
            where="--dataset_path",
        )
    found = [_read_part(prefix, split) for prefix in prefixes]
    # Megatron gives a blend without weights one epoch and no more; the numbers of tokens mean the same mixture.
    weights = [
        float(part.num_tokens) if weight is None else weight for part, (_, weight, _) in zip(found, parts, strict=True)
    ]
    by_label: dict[str, list[tuple[int, int]]] = {}
    for name, tokens, text_bytes in itertools.chain(*(_labels(prefix, prefixes) for prefix in prefixes)):
        by_label.setdefault(name, []).append((tokens, text_bytes))
    has_labels = 1 < len(by_label) <= MAX_LABELS
    largest_ids = [part.tokenizer.largest_id for part in found if part.tokenizer]
    splits = [part.split_tokens for part in found]
    return DatasetReading(
        facts=DatasetFacts(
            prefixes=tuple(str(prefix) for prefix in prefixes),
            weights=tuple(weights) if len(prefixes) > 1 else (),
            num_tokens=sum(part.num_tokens for part in found),
            num_documents=sum(part.num_documents for part in found),
            max_token_id=max(largest_ids, default=None),
            data_hash=hashlib.sha256("".join(part.data_hash for part in found).encode()).hexdigest()
            + _samples(prefixes),
            row_length=_row_length({part.row_length for part in found} - {None}),
            labels=tuple(sorted(by_label)) if has_labels else (),
            label_bytes_per_token={name: _bytes_per_token(by_label[name]) for name in sorted(by_label)}
            if has_labels
            else {"": _bytes_per_token([*itertools.chain(*by_label.values())])},
            part_names=part_names(blend, parts),
            schedule=blend_changes(blend_schedule, blend, parts),
        ),
        split_tokens=tuple(tokens for tokens in splits if tokens) if all(splits) else None,
        tokenizers=tuple(part.tokenizer.sha256 if part.tokenizer else None for part in found),
        without_eod=tuple(str(prefix) for prefix, part in zip(prefixes, found, strict=True) if not part.has_eod),
    )


def _labels(path: Path | str, among: Sequence[Path | str]) -> Sequence[tuple[str, int, int]]:
    """`DocumentLabels.sizes`; of data at URLs nothing is known before they are there."""
    try:
        return () if is_url(path) else document_labels(path, among).sizes
    except DataError as error:
        raise RequestError(error.found, where=error.where, needed=error.needed, action=error.action) from error


def _bytes_per_token(sizes: Sequence[tuple[int, int]]) -> float:
    """Of data with so many tokens and bytes of text; 0 where those of a part are not known."""
    num_tokens = sum(tokens for tokens, _ in sizes)
    is_known = num_tokens and all(text_bytes or not tokens for tokens, text_bytes in sizes)
    return sum(text_bytes for _, text_bytes in sizes) / num_tokens if is_known else 0.0


def _row_length(lengths: set[int | None]) -> int | None:
    if len(lengths) > 1:
        raise RequestError(
            f"sets packed by bestfit into rows of {' and '.join(sorted(map(str, lengths)))} tokens",
            needed="rows of one length",
            action="pack them again with the same --sequence_length",
            where="--dataset_path",
        )
    return lengths.pop() if lengths else None


@dataclass(frozen=True)
class _Part:
    num_tokens: int
    num_documents: int
    split_tokens: tuple[int, int, int] | None
    tokenizer: TokenizerRecord | None
    data_hash: str
    row_length: int | None
    has_eod: bool


def _read_part(path: Path | str, split: str) -> _Part:
    kind = documents_kind(path)
    if kind is None:
        return _read_pair(path, split)
    found = kind(path)
    tokens = _split_tokens(found.sequence_lengths, split, found.row_length)
    return _Part(
        found.num_tokens, len(found), tokens, found.tokenizer, found.data_hash, found.row_length, found.has_eod
    )


def _read_pair(prefix: Path | str, split: str) -> _Part:
    try:
        pair, manifest = IndexedDataset(prefix), read_manifest(prefix)
    except DataError as error:
        raise RequestError(error.found, where=error.where, needed=error.needed, action=error.action) from error
    some = np.linspace(0, pair.num_sequences - 1, min(_EOD_DOCUMENTS, pair.num_sequences), dtype=np.int64)
    if manifest:
        _check_manifest(prefix, pair, manifest, some)
    tokenizer = manifest.tokenizer if manifest else None
    data_hash = _manifest_digest(manifest) if manifest else _files_digest(prefix)
    tokens, last = _split_tokens(pair.sequence_lengths, split), last_token(pair, some)
    has_eod = (manifest.append_eod or last == manifest.tokenizer.eod_id) if manifest else last is not None
    return _Part(pair.num_tokens, pair.num_documents, tokens, tokenizer, data_hash, None, has_eod)


def _check_manifest(prefix: Path | str, dataset: IndexedDataset, manifest: Manifest, some: NDArray[np.int64]) -> None:
    """Raise RequestError for data that its manifest doesn't describe, by its sizes and the ends of some documents."""
    recorded = manifest.num_documents, manifest.bin_bytes, manifest.dtype
    found = dataset.num_documents, bin_path(prefix).stat().st_size, dataset.dtype.name
    if recorded != found:
        raise RequestError(
            "its manifest says {} documents, {} bytes and {}, the pair has {}, {} and {}".format(*recorded, *found),
            action="the manifest is of other data: preprocess again, or copy all three files",
            where=str(prefix),
        )
    if manifest.append_eod and dataset.num_sequences and (problem := eod_problem(dataset, manifest, some)):
        raise RequestError(
            problem,
            needed="exactly one EOD at the end of every document, as the manifest says",
            action="look at it with inspect_data.py verify, and preprocess again",
            where=str(prefix),
        )


def _split_tokens(lengths: NDArray[np.int32], split: str, row_length: int | None = None) -> tuple[int, int, int] | None:
    try:
        shares = parse_split(split)
    except RequestError:  # reported by the checks of the request
        return None
    # Samples out of a stream need a token more than they have, the label of their last; rows don't.
    more = 0 if row_length is None else 1
    training, validation, test = (
        int(lengths[begin:end].sum(dtype=np.int64)) + more
        for begin, end in itertools.pairwise(split_bounds(shares, len(lengths)))
    )
    return (training, validation, test)


def _samples(paths: list[Path | str]) -> str:
    """`+` and a hash of samples of pairs and packed sets, whose manifests may describe other bytes.

    Shards have a checksum for each sample, which is compared when it is read.
    """
    tokens: list[Path] = []
    for path in paths:
        kind = documents_kind(path)
        if kind is None:
            tokens += [bin_path(path), idx_path(path)]
        elif kind is PackedDocuments:
            tokens += sorted(Path(path).rglob("*.arrow"))
    if not tokens:
        return ""
    ranges = [(path, 0, path.stat().st_size) for path in tokens]
    return f"+{files.hash_samples(ranges, num_windows=_DATA_WINDOWS)}"


def _manifest_digest(manifest: Manifest) -> str:
    """Changes when the content of a pair does, not with its path or the number of times it was made."""
    content = f"{manifest.bin_bytes} {manifest.bin_crc32} {manifest.num_documents} {manifest.tokenizer.sha256}"
    return hashlib.sha256(content.encode()).hexdigest()


def _files_digest(prefix: Path | str) -> str:
    """The same for a pair without a manifest: of its index, and the ends of its tokens."""
    digest = hashlib.sha256(files.hash_file(idx_path(prefix)).encode())
    with bin_path(prefix).open("rb") as tokens:
        digest.update(tokens.read(_EDGE_BYTES))
        size = tokens.seek(0, 2)
        tokens.seek(max(0, size - _EDGE_BYTES))
        digest.update(tokens.read(_EDGE_BYTES))
    return digest.hexdigest()
