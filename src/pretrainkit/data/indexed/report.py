"""What a finished preprocessing run says."""

from __future__ import annotations

import sys
from dataclasses import asdict

import orjson

from pretrainkit.data.indexed.manifest import Manifest
from pretrainkit.units import format_count, format_duration


def summary(manifest: Manifest) -> str:
    """One line: the books of a pair, tokens and rate."""
    source = f" of {manifest.inputs[0].path}" if len(manifest.inputs) == 1 else ""
    return (
        f"{manifest.key}{source}: {manifest.num_records} records in = {manifest.num_documents} documents out"
        f" + {manifest.num_empty} empty + {manifest.num_rejected} rejected"
        f" (and {manifest.num_blank_lines} blank lines); {format_count(manifest.num_tokens)} tokens"
        f" ({manifest.num_tokens}) as {manifest.dtype}; {format_duration(manifest.elapsed_s)},"
        f" {manifest.megabytes_per_second:.1f} MB/s, {manifest.tokenizer.engine}"
    )


def print_manifests(manifests: list[Manifest], *, as_json: bool) -> None:
    """Print one line a pair, or all manifests as a JSON list."""
    if as_json:
        sys.stdout.write(
            orjson.dumps([asdict(manifest) for manifest in manifests], option=orjson.OPT_INDENT_2).decode()
        )
        sys.stdout.write("\n")
        return
    for manifest in manifests:
        sys.stdout.write(summary(manifest) + "\n")
