"""What pack_dataset.py prints."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson

from pretrainkit.data.packed.format import PackedManifest, manifest_to_json


def print_packed(folder: Path, manifest: PackedManifest, *, prepared: bool, as_json: bool) -> None:
    """One line, or the manifest as JSON."""
    if as_json:
        sys.stdout.write(orjson.dumps(manifest_to_json(manifest), option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    books = manifest.documents
    sys.stdout.write(
        f"{folder}: {books['num_records']} records in = {books['num_documents']} documents + {books['num_empty']} empty"
        f" + {books['num_rejected']} rejected; {manifest.num_sequences} sequences of {manifest.sequence_length},"
        f" {manifest.num_tokens} tokens, {manifest.num_padding} padding, {manifest.num_dropped} dropped at the end;"
        f" {f'prepared in {manifest.elapsed_s:.1f} s' if prepared else 'was ready'}\n"
    )
