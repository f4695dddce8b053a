"""Manifests for pairs that tests write by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import xxhash
from isal.isal_zlib import crc32

from pretrainkit.data.indexed.format import IndexedDataset, bin_path, idx_path
from pretrainkit.data.indexed.manifest import Manifest, TokenizerRecord, manifest_path
from pretrainkit.files import hash_file, write_json

EOD = 1


def describe(prefix: Path, **changes: object) -> Manifest:
    """Write a true manifest for a pair, or one that says something else."""
    dataset = IndexedDataset(prefix)
    tokenizer = TokenizerRecord("folder", "ab" * 32, 319, EOD, 0, "tokenizers")
    manifest = Manifest(
        key="text",
        dtype=dataset.dtype.name,
        num_documents=dataset.num_documents,
        num_tokens=dataset.num_tokens,
        num_records=dataset.num_documents,
        num_empty=0,
        num_rejected=0,
        num_blank_lines=0,
        num_replaced=0,
        num_input_bytes=10,
        bin_bytes=bin_path(prefix).stat().st_size,
        bin_crc32=crc32(bin_path(prefix).read_bytes()),
        idx_xxh3_128=hash_file(idx_path(prefix), xxhash.xxh3_128),
        append_eod=True,
        add_bos=False,
        special_tokens_in_text="plain",
        tokenizer=tokenizer,
        inputs=(),
    )
    write_json(manifest_path(prefix), replace(manifest, **changes).to_json())  # type: ignore[arg-type]
    return manifest
