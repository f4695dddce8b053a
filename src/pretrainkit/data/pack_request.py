"""What to pack and how, checked before any work; and the fingerprint that says whether it was done already."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit.data import encoder
from pretrainkit.data.machine_defaults import MachineSettings
from pretrainkit.data.packed import FORMAT, PackedManifest, read_packed_manifest
from pretrainkit.data.sources import resolve_inputs
from pretrainkit.data.tokenizer import TokenizerFile, load_tokenizer
from pretrainkit.errors import DataError, RequestError

HUB = "hub:"
"""Begins the name of a dataset on the Hugging Face hub."""


@dataclass(frozen=True)
class PackRequest:
    """The flags of pack_dataset.py."""

    inputs: tuple[str, ...]
    output_dir: Path
    tokenizer_model: str
    sequence_length: int
    packing: str = "concat"
    """`concat` or `bestfit`."""
    text_column: str = "text"
    append_eod: bool = True
    eod_token: str | None = None
    add_bos: bool = False
    special_tokens_in_text: str = "plain"
    text_documents: str = "line"
    on_error: str = "stop"
    max_document_bytes: int = 0
    verify_tokens: str = "sample"
    engine: str = "auto"
    hub_split: str = "train"
    hub_revision: str | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class PackPlan:
    """A checked request."""

    request: PackRequest
    machine: MachineSettings
    tokenizer: TokenizerFile
    settings: dict[str, Any]
    fingerprint: str

    @property
    def staging(self) -> Path:
        """Folder of unfinished work, which the next preparer continues."""
        final = self.request.output_dir
        return final.with_name(f"{final.name}.staging-{self.fingerprint[:16]}")

    def finished(self) -> PackedManifest | None:
        """The set, if it is there and of this very request."""
        manifest = read_packed_manifest(self.request.output_dir)
        return manifest if manifest is not None and manifest.fingerprint == self.fingerprint else None


def make_pack_plan(request: PackRequest, machine: MachineSettings) -> PackPlan:
    """Check a request. Raises RequestError, also when the output is there and was made otherwise; writes nothing."""
    if request.sequence_length < 2:
        raise RequestError(f"{request.sequence_length}", where="--sequence_length", needed="2 or more")
    tokenizer = load_tokenizer(request.tokenizer_model, request.eod_token)
    if request.append_eod and tokenizer.eod_id is None:
        raise RequestError(
            "documents are to end with EOD, but this tokenizer names no EOS token",
            where=request.tokenizer_model,
            action="name the token with --eod_token, or give --no-append_eod",
        )
    if request.add_bos and tokenizer.bos_id is None:
        raise RequestError("--add_bos, but this tokenizer names no BOS token", where=request.tokenizer_model)
    settings = {
        "format": FORMAT,
        "inputs": _inputs(request),
        "tokenizer": tokenizer.sha256,
        "eod_id": tokenizer.eod_id if request.append_eod else None,
        "bos_id": tokenizer.bos_id if request.add_bos else None,
        "special_tokens_in_text": request.special_tokens_in_text,
        "text_column": request.text_column,
        "text_documents": request.text_documents,
        "on_error": request.on_error,
        "max_document_bytes": request.max_document_bytes,
        "sequence_length": request.sequence_length,
        "packing": request.packing,
        "versions": encoder.versions(),
    }
    fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    plan = PackPlan(request, machine, tokenizer, settings, fingerprint)
    _check_output(plan)
    return plan


def _inputs(request: PackRequest) -> list[Any]:
    hub = [name for name in request.inputs if name.startswith(HUB)]
    if not hub:
        sources = resolve_inputs(request.inputs, request.text_documents)
        return [[source.relative, source.num_bytes, source.modified_ns] for source in sources]
    if len(request.inputs) > 1:
        raise RequestError("a hub dataset among several inputs", where="--input", needed="it alone")
    return [[hub[0], request.hub_split, request.hub_revision]]


def _check_output(plan: PackPlan) -> None:
    folder = plan.request.output_dir
    if plan.request.overwrite or not folder.exists():
        return
    try:
        manifest = read_packed_manifest(folder)
    except DataError as error:
        raise RequestError(error.found, where=error.where, action="remove the folder, or give --overwrite") from error
    if manifest is None:
        if not folder.is_dir() or any(folder.iterdir()):
            raise RequestError("there, and no packed set", where=str(folder), action="give another --output_dir")
        return
    if manifest.fingerprint != plan.fingerprint:
        different = [name for name, value in plan.settings.items() if manifest.settings.get(name) != value]
        raise RequestError(
            f"a packed set of other {', '.join(different)} is here",
            where=str(folder),
            action="give another --output_dir, or --overwrite to replace it once the new one is complete",
        )
