"""run.json, the one file that every rank reads: written and read exactly.

Unknown or missing fields, other types and other format versions are refused.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import RequestError
from pretrainkit.records import RecordError, decode

FORMAT_VERSION = 10
"""Raised whenever a reader of the old format would misread the new one, and when a field is added."""
OLD_VERSIONS = (1, 2, 3, 4, 5, 6, 7, 8, 9)
"""Formats whose missing fields have their default values."""
_TWO_FIELDS_OF_WEIGHTS = (1, 2)
"""Those which have `_initial_weights_of_old_format`."""


def to_json(run: ResolvedRun) -> dict[str, Any]:
    """The JSON object of a run."""
    return {"format_version": FORMAT_VERSION, **dataclasses.asdict(run)}


def write_run(path: Path, run: ResolvedRun) -> None:
    """Write run.json atomically."""
    files.write_json(path, to_json(run))


def read_run(path: Path) -> ResolvedRun:
    """Read run.json. Raises RequestError, with the file and the field, for anything unexpected."""
    where = str(path)
    try:
        fields = files.read_json(path)
    except FileNotFoundError:
        action = "start the run with pretraining/pretrain.py, which writes it"
        raise RequestError("no such file", action=action, where=where) from None
    except (OSError, ValueError) as error:
        action = "restore it (each attempt's log folder has that attempt's), or take another --experiment"
        raise RequestError(f"not readable as JSON: {error}", action=action, where=where) from error
    version = fields.pop("format_version", None) if isinstance(fields, dict) else None
    if version not in (FORMAT_VERSION, *OLD_VERSIONS):
        raise RequestError(
            f"format version {version}",
            needed=f"version {FORMAT_VERSION}",
            action="write the file again with this version of pretrain.py",
            where=where,
        )
    if version in _TWO_FIELDS_OF_WEIGHTS:
        fields["initial_weights"] = _initial_weights_of_old_format(fields, path.parent)
    try:
        return decode(ResolvedRun, fields, all_fields=version not in OLD_VERSIONS)
    except RecordError as error:
        raise RequestError(error.found, needed=error.needed, action=error.action, where=where) from error


def _initial_weights_of_old_format(fields: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """`initial_weights` from two fields, which are removed, and a text file with the fingerprint next to run.json."""
    checkpoint, hf_weights = fields.pop("initial_checkpoint", None), fields.pop("hf_weights", None)
    if not checkpoint:
        return None
    record = folder / "initial_weights.txt"
    return {
        "source": hf_weights if hf_weights and Path(checkpoint).parent.name == ".converted" else checkpoint,
        "checkpoint": checkpoint,
        "fingerprint": (record.read_text(encoding="ascii").strip() if record.is_file() else "") or None,
        "hf_weights": hf_weights,
    }
