"""Whether a prepared dataset is complete and matches its manifest: structure, pointers, ids, checksums, EOD.

The .bin is read once, in order, so the disk's speed is the limit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from pretrainkit.data.indexed.format import HEADER, IndexedDataset, bin_path, idx_path
from pretrainkit.data.indexed.labels import LabelRecord, StoredLabels, label_code, labels_path
from pretrainkit.data.indexed.manifest import Manifest, read_manifest
from pretrainkit.errors import DataError
from pretrainkit.files import hash_file

BLOCK = 1 << 20
"""Ids, or entries of the index, that are checked at once."""


@dataclass(frozen=True)
class Verification:
    """The result of verifying one pair."""

    prefix: Path
    num_tokens: int = 0
    num_documents: int = 0
    has_manifest: bool = False
    largest_id: int = -1
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(prefix: Path | str, num_ids: int | None = None) -> Verification:
    """Check everything in a pair. `num_ids` bounds the ids where there is no manifest to do so."""
    prefix = Path(prefix)
    try:
        dataset = IndexedDataset(prefix)
        manifest = read_manifest(prefix)
    except DataError as error:
        return Verification(prefix, problems=[str(error)])
    problems = _index_problems(dataset)
    notes = []
    if manifest is None:
        notes.append("no manifest: data made by Megatron itself")
    else:
        num_ids = manifest.tokenizer.largest_id + 1
    checksum, smallest, largest = _read_tokens(dataset)
    if smallest < 0:
        problems.append(f"a token id is negative: {smallest}")
    if num_ids is not None and largest >= num_ids:
        problems.append(f"token id {largest}, but the tokenizer has ids up to {num_ids - 1}")
    if manifest is not None:
        problems += _manifest_problems(dataset, manifest, checksum)
        problems += _label_problems(prefix, manifest.labels) if manifest.labels else []
        if not problems and manifest.append_eod:
            problems += _eod_problems(dataset, manifest)
    return Verification(
        prefix, dataset.num_tokens, dataset.num_documents, manifest is not None, largest, problems, notes
    )


def _index_problems(dataset: IndexedDataset) -> list[str]:
    problems = []
    size = idx_path(dataset.prefix).stat().st_size
    plain = HEADER.size + 12 * dataset.num_sequences + 8 * len(dataset.document_indices)
    if size not in (plain, plain + dataset.num_sequences):  # a byte a sequence more: Megatron's multimodal data
        problems.append(f"the index has {size} bytes, its header announces {plain}")
    offset, itemsize = 0, dataset.dtype.itemsize
    for begin in range(0, dataset.num_sequences, BLOCK):
        lengths = dataset.sequence_lengths[begin : begin + BLOCK]
        if lengths.min() < 0:
            problems.append(f"sequence {begin + int(np.argmin(lengths))} has a negative length")
            break
        ends = np.cumsum(lengths, dtype=np.int64) * itemsize + offset
        wrong = np.flatnonzero(dataset.sequence_pointers[begin : begin + BLOCK] != ends - lengths * np.int64(itemsize))
        if wrong.size:
            problems.append(f"sequence {begin + int(wrong[0])} does not begin where the one before it ends")
            break
        offset = int(ends[-1])
    documents = dataset.document_indices
    if documents[0] != 0 or documents[-1] != dataset.num_sequences:
        problems.append(f"documents cover sequences {documents[0]} to {documents[-1]} of {dataset.num_sequences}")
    for begin in range(0, len(documents) - 1, BLOCK):
        if np.any(np.diff(documents[begin : begin + BLOCK + 1]) < 0):
            problems.append("the document index goes backwards")
            break
    return problems


def _read_tokens(dataset: IndexedDataset) -> tuple[int, int, int]:
    """CRC-32, smallest and largest id."""
    checksum, smallest, largest = 0, 0, -1
    with bin_path(dataset.prefix).open("rb") as file:
        while (ids := np.fromfile(file, dataset.dtype, BLOCK)).size:
            checksum = crc32(ids, checksum)
            smallest, largest = min(smallest, int(ids.min())), max(largest, int(ids.max()))
    return checksum, smallest, largest


def _manifest_problems(dataset: IndexedDataset, manifest: Manifest, checksum: int) -> list[str]:
    compared: dict[str, tuple[int | str, int | str]] = {
        "documents": (dataset.num_documents, manifest.num_documents),
        "tokens": (dataset.num_tokens, manifest.num_tokens),
        "dtype": (dataset.dtype.name, manifest.dtype),
        "checksum (CRC-32) of the .bin": (checksum, manifest.bin_crc32),
    }
    if manifest.idx_xxh3_128:
        found_hash = hash_file(idx_path(dataset.prefix), xxhash.xxh3_128)
        compared["hash (XXH3-128) of the .idx"] = (found_hash, manifest.idx_xxh3_128)
    return [
        f"{what}: {found} on disk, {said} in the manifest" for what, (found, said) in compared.items() if found != said
    ]


def _label_problems(prefix: Path, record: LabelRecord) -> list[str]:
    try:
        labels = StoredLabels(prefix, record)
    except DataError as error:
        return [str(error)]
    num_documents = sum(documents for documents, _ in record.counts.values())
    checksum, counts = 0, Counter[int]()
    for begin in range(0, num_documents, BLOCK):
        found = labels.codes(np.arange(begin, min(begin + BLOCK, num_documents)))
        checksum = crc32(found.astype("<u4"), checksum)
        counts.update(dict(zip(*(part.tolist() for part in np.unique(found, return_counts=True)), strict=True)))
    wanted = {label_code(label): documents for label, (documents, _) in record.counts.items() if documents}
    if (checksum, counts) != (record.crc32, wanted):
        return [f"{labels_path(prefix)} is not what the manifest says (CRC-32 {checksum}, not {record.crc32})"]
    return []


def _eod_problems(dataset: IndexedDataset, manifest: Manifest) -> list[str]:
    for begin in range(0, dataset.num_sequences, BLOCK):
        found = eod_problem(dataset, manifest, np.arange(begin, min(begin + BLOCK, dataset.num_sequences)))
        if found:
            return [found]
    return []


def _ends(dataset: IndexedDataset, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of the last tokens of these documents."""
    begins = dataset.sequence_pointers[numbers] // dataset.dtype.itemsize
    return begins + dataset.sequence_lengths[numbers] - 1


def last_token(dataset: IndexedDataset, numbers: NDArray[np.int64]) -> int | None:
    """The token that ends all of these documents, as an EOD does; None if there is no such token."""
    found = np.unique(dataset.tokens[_ends(dataset, numbers[dataset.sequence_lengths[numbers] > 0])])
    return int(found[0]) if len(found) == 1 else None


def eod_problem(dataset: IndexedDataset, manifest: Manifest, numbers: NDArray[np.int64]) -> str:
    """Which of these documents does not end with exactly one EOD, in words; empty if none.

    Where a text may spell EOD as a token, some may end with two; not the most, as when the corpus has them already.
    """
    eod_id, lengths, ends = manifest.tokenizer.eod_id, dataset.sequence_lengths[numbers], _ends(dataset, numbers)
    wrong = np.flatnonzero(dataset.tokens[ends] != eod_id)
    if wrong.size:
        return f"document {numbers[wrong[0]]} does not end with EOD ({eod_id})"
    twice = np.flatnonzero((lengths > 1) & (dataset.tokens[np.maximum(ends - 1, 0)] == eod_id))
    if twice.size and manifest.special_tokens_in_text != "encode":
        return f"document {numbers[twice[0]]} ends with EOD twice"
    if 2 * twice.size > len(numbers):
        return f"document {numbers[twice[0]]} and most others end with EOD twice: their texts end with its spelling"
    return ""
