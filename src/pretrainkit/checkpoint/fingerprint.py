"""Identifies a Hugging Face folder's weights at any path, and what a converted checkpoint records of its source."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pretrainkit.checkpoint.formats.hf_files import weight_files
from pretrainkit.files import read_object

REPORT_NAME = "conversion.json"
"""File in a converted checkpoint with the report of its conversion."""
SAMPLES = 64
"""Number of samples per file."""
SAMPLE_BYTES = 4096


def weights_fingerprint(folder: Path) -> str:
    """A hash of the sizes, headers and samples of a folder's weight files.

    It distinguishes models, including retrained ones, but may miss a few changed values, unlike a hash of all bytes.
    """
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = min(size, 8 + int.from_bytes(file.read(8), "little"))
            digest.update(f"{size} ".encode())
            file.seek(0)
            digest.update(file.read(header_bytes))
            for sample in range(SAMPLES):
                file.seek(header_bytes + (size - header_bytes) * sample // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def source_fingerprint(checkpoint: Path) -> str | None:
    """The fingerprint of the weights that a checkpoint was converted from; None where it wasn't, or was cast."""
    return read_object(checkpoint / REPORT_NAME).get("source_fingerprint") or None
