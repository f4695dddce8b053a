"""Joins prepared datasets into one: documents of the first, then of the second, and so on, in constant memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from isal.isal_zlib import crc32_combine

from pretrainkit.data.indexed.file_bytes import copy_range
from pretrainkit.data.indexed.format import (
    HEADER,
    IndexedDataset,
    bin_path,
    check_output_prefix,
    idx_path,
    open_pair,
    write_header,
)
from pretrainkit.data.indexed.labels import LABEL_BYTES, LabelRecord, add_counts, label_record, labels_path
from pretrainkit.data.indexed.manifest import InputFile, Manifest, manifest_path, read_manifest
from pretrainkit.data.indexed.pair_set import SHARD_NAME, check_sets
from pretrainkit.errors import RequestError
from pretrainkit.files import commit_all, fsync_path, hash_file, remove_leftovers, temporary_name, write_json
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
BLOCK = 1 << 20
SUMMED = (
    "num_documents",
    "num_tokens",
    "num_records",
    "num_empty",
    "num_rejected",
    "num_blank_lines",
    "num_replaced",
    "num_spelled",
    "num_contaminated",
    "num_input_bytes",
    "bin_bytes",
)


def merge(prefixes: list[Path], output_prefix: Path | str, *, overwrite: bool = False) -> Manifest | None:
    """Write `<output_prefix>.bin` and `.idx` out of complete pairs, in the order given.

    Gives the manifest of the result, None if the parts have none. Raises RequestError, before it writes, for parts
    of different dtype or tokenizer, missing shards, or existing output without `overwrite`.
    """
    check_output_prefix(str(output_prefix))
    dtypes = [open_pair(prefix).dtype for prefix in prefixes]
    manifests = _check(prefixes, dtypes)
    finals = [bin_path(output_prefix), idx_path(output_prefix), manifest_path(output_prefix)]
    if manifests and manifests[0].labels:
        finals.insert(2, labels_path(output_prefix))
    existing = [str(path) for path in finals if path.exists()]
    if existing and not overwrite:
        raise RequestError(f"output exists: {', '.join(existing)}", action="give another name, or --overwrite")
    if {path.resolve() for path in prefixes} & {Path(output_prefix).resolve()}:
        raise RequestError("the output is one of the inputs", where=str(output_prefix))
    Path(output_prefix).parent.mkdir(parents=True, exist_ok=True)
    for path in finals:
        remove_leftovers(path)
    tokens, index, *labels, record = temporaries = [temporary_name(path) for path in finals]
    joined = None
    try:
        _concatenate(tokens, map(bin_path, prefixes))
        for path in labels:
            _concatenate(path, map(labels_path, prefixes))
        _write_index(index, prefixes, dtypes[0])
        for path in (tokens, index, *labels):
            fsync_path(path)
        if manifests is not None:
            joined = _join(manifests, hash_file(index, xxhash.xxh3_128))
            write_json(record, joined.to_json())
        commit_all([*zip(temporaries, finals, strict=True)])
        if not labels:  # those of an output that was replaced
            labels_path(output_prefix).unlink(missing_ok=True)
    finally:
        for path in temporaries:
            path.unlink(missing_ok=True)
    return joined


def _check(prefixes: list[Path], dtypes: list[np.dtype]) -> list[Manifest] | None:
    if len({path.resolve() for path in prefixes}) < len(prefixes):
        raise RequestError("a part is named twice", where="--input")
    for prefix, dtype in zip(prefixes, dtypes, strict=True):
        if dtype != dtypes[0]:
            raise RequestError(
                f"{prefixes[0]} holds {dtypes[0]}, {prefix} holds {dtype}",
                needed="one dtype",
                action="preprocess one of them again with the same tokenizer, or --dtype int32",
            )
    check_sets(prefixes)
    shards = [int(match[1]) for prefix in prefixes if (match := SHARD_NAME.search(prefix.name))]
    if len(shards) == len(prefixes) and shards != sorted(shards):
        raise RequestError(f"parts come in the order {shards}", where="--input", needed="ascending order")
    manifests = [read_manifest(prefix) for prefix in prefixes]
    known = [manifest for manifest in manifests if manifest is not None]
    if len(known) < len(manifests):
        if known:
            LOGGER.warning("some parts have no manifest, so the output gets none")
        return None
    for prefix, manifest in zip(prefixes, known, strict=True):
        for name in ("append_eod", "add_bos"):
            if getattr(manifest, name) != getattr(known[0], name):
                raise RequestError(f"{prefixes[0]} and {prefix} differ in {name}", needed="one policy")
        if (manifest.labels and manifest.labels.key) != (known[0].labels and known[0].labels.key):
            raise RequestError(f"{prefixes[0]} and {prefix} differ in --label-key", needed="one for all, or none")
        if manifest.tokenizer.sha256 != known[0].tokenizer.sha256:
            raise RequestError(
                f"{prefixes[0]} was made with {known[0].tokenizer.name}, {prefix} with {manifest.tokenizer.name}",
                needed="one tokenizer",
            )
    return known


def _concatenate(path: Path, parts: Iterable[Path]) -> None:
    path.touch()
    offset = 0
    for part in parts:
        size = part.stat().st_size
        copy_range(part, 0, path, offset, size)
        offset += size


def _write_index(path: Path, prefixes: list[Path], dtype: np.dtype) -> None:
    with path.open("wb") as file:
        write_header(file, dtype, 0, 0)
        file.flush()
        num_sequences = num_documents = 0
        for part in map(IndexedDataset, prefixes):
            end = HEADER.size + 4 * num_sequences
            copy_range(idx_path(part.prefix), HEADER.size, path, end, 4 * part.num_sequences)
            num_sequences, num_documents = num_sequences + part.num_sequences, num_documents + part.num_documents
        file.seek(0)
        write_header(file, dtype, num_sequences, num_documents)
        file.seek(0, os.SEEK_END)
        first_byte = 0
        for part in map(IndexedDataset, prefixes):
            for begin in range(0, part.num_sequences, BLOCK):
                file.write((part.sequence_pointers[begin : begin + BLOCK] + first_byte).data)
            first_byte += part.num_tokens * dtype.itemsize
        file.write(np.zeros(1, dtype=np.int64).data)
        first_sequence = 0
        for part in map(IndexedDataset, prefixes):
            for begin in range(1, len(part.document_indices), BLOCK):
                file.write((part.document_indices[begin : begin + BLOCK] + first_sequence).data)
            first_sequence += part.num_sequences


def _join(manifests: list[Manifest], idx_xxh3_128: str) -> Manifest:
    checksum = 0
    inputs: dict[str, InputFile] = {}
    for manifest in manifests:
        checksum = crc32_combine(checksum, manifest.bin_crc32, manifest.bin_bytes)
        for entry in manifest.inputs:
            if entry.path in inputs:  # jobs of an array each read a part of it
                old = inputs[entry.path]
                entry = replace(
                    old,
                    xxh3_128="",
                    num_records=old.num_records + entry.num_records,
                    num_tokens=old.num_tokens + entry.num_tokens,
                    num_text_bytes=_known_sum([old, entry]),
                )
            inputs[entry.path] = entry
    sums = {name: sum(getattr(manifest, name) for manifest in manifests) for name in SUMMED}
    return replace(
        manifests[0],
        **sums,
        bin_crc32=checksum,
        idx_xxh3_128=idx_xxh3_128,
        num_text_bytes=_known_sum(manifests),
        inputs=tuple(inputs.values()),
        part=None,
        labels=_joined_labels([manifest.labels for manifest in manifests if manifest.labels]),
        decontamination=_joined_decontamination([manifest.decontamination for manifest in manifests]),
        elapsed_s=sum(manifest.elapsed_s for manifest in manifests),
        finished_at=max(manifest.finished_at for manifest in manifests),
        notes=(*manifests[0].notes, f"joined from {len(manifests)} parts"),
    )


def _known_sum(parts: Sequence[Manifest | InputFile]) -> int:
    """Text bytes of all parts; 0, not known, if a part with tokens has none: a record of an older version."""
    known = all(part.num_text_bytes or not part.num_tokens for part in parts)
    return sum(part.num_text_bytes for part in parts) if known else 0


def _joined_labels(parts: list[LabelRecord]) -> LabelRecord | None:
    checksum, counts = 0, dict[str, list[int]]()
    for part in parts:
        num_documents = sum(documents for documents, _ in part.counts.values())
        checksum = crc32_combine(checksum, part.crc32, num_documents * LABEL_BYTES)
        add_counts(counts, {label: [*found, part.text_bytes.get(label, 0)] for label, found in part.counts.items()})
    return label_record(parts[0].key, checksum, counts) if parts else None


def _joined_decontamination(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """With the sums of all parts' overlaps; empty unless all were looked at for the same evaluation sets."""
    first = parts[0]
    if any({**part, "overlaps": None} != {**first, "overlaps": None} for part in parts) or not first:
        return {}
    return first | {"overlaps": {name: sum(part["overlaps"][name] for part in parts) for name in first["overlaps"]}}
