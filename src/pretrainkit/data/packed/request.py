"""A request for a packed dataset, checked before any work, and the fingerprint that shows if it was built already."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from pretrainkit.data.packed.format import InputState, PackedManifest, packed_damage, read_packed_manifest
from pretrainkit.data.readers.inputs import resolve_inputs
from pretrainkit.data.readers.source import BLOCK_BYTES
from pretrainkit.data.request import TextRequest
from pretrainkit.data.tokens import encoder
from pretrainkit.data.tokens.tokenizer import TokenizerFile, load_tokenizer
from pretrainkit.errors import DataError, RequestError, machine_errors
from pretrainkit.logs import get_logger
from pretrainkit.units import format_bytes

LOGGER = get_logger(__name__)

SAME = (
    *("special_tokens_in_text", "text_column", "text_documents", "on_error", "max_document_bytes"),
    *("sequence_length", "packing"),
)
"""Fields of the request that decide what the set holds."""
HUB = "hub:"
"""Begins the name of a dataset on the Hugging Face hub."""
WORKER_BYTES = 1 << 30
"""Memory to have for a worker: a large tokenizer's tables and caches take about half of it."""
SIZES = (
    # name, cores and memory from which it holds, sequences assembled at once, sequences in a record batch
    ("large", 64, 256 << 30, 16_384, 4_096),
    ("normal", 8, 32 << 30, 4_096, 1_024),
    ("small", 0, 0, 1_024, 256),
)


@dataclass(frozen=True)
class MachineSettings:
    """Processes and batch sizes of a packing run."""

    num_proc: int
    """Processes that tokenise."""
    batch_size: int
    """Sequences that are assembled in memory at once."""
    writer_batch_size: int
    """Sequences in a record batch of the Arrow file."""
    origins: str
    """Where each value comes from, for the log."""


def machine_settings(
    environment: Mapping[str, str],
    *,
    num_proc: int | None = None,
    batch_size: int | None = None,
    writer_batch_size: int | None = None,
    cores: int | None = None,
    memory_bytes: int | None = None,
) -> MachineSettings:
    """From flags, else DATASET_NUM_PROC, DATASET_BATCH_SIZE and DATASET_WRITER_BATCH_SIZE, else the machine's size.

    Raises RequestError for a value that is not a number above 0.
    """
    cores = cores or len(os.sched_getaffinity(0))
    memory_bytes = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name, _, _, batch, writer_batch = next(size for size in SIZES if cores >= size[1] and memory_bytes >= size[2])
    chosen, origins = [], []
    for variable, flag, default in (
        ("DATASET_NUM_PROC", num_proc, max(1, min(cores, memory_bytes // WORKER_BYTES))),
        ("DATASET_BATCH_SIZE", batch_size, batch),
        ("DATASET_WRITER_BATCH_SIZE", writer_batch_size, writer_batch),
    ):
        given = {"flag": flag, "environment": environment.get(variable) or None, "default": default}
        origin, value = next((origin, value) for origin, value in given.items() if value is not None)
        number = int(value) if str(value).strip().isdecimal() else 0
        if number < 1:
            raise RequestError(f"{value!r}", where=variable, needed="a number above 0")
        chosen.append(number)
        origins.append(f"{variable}={number} ({origin})")
    machine = f"{name} machine: {cores} cores, {format_bytes(memory_bytes)}"
    return MachineSettings(chosen[0], chosen[1], chosen[2], f"{machine}; {', '.join(origins)}")


@dataclass(frozen=True)
class PackRequest(TextRequest):
    """The flags of pack_dataset.py."""

    inputs: tuple[str, ...]
    output_dir: Path
    tokenizer_model: str
    sequence_length: int
    packing: str = "concat"
    """`concat` or `bestfit`."""
    text_column: str = "text"
    append_eod: bool = field(default=True, kw_only=True)
    hub_split: str = "train"
    hub_revision: str | None = None
    verify: bool = False
    """Read a set that is there, too: the sizes of its files are looked at in any case."""


@dataclass(frozen=True)
class PackPlan:
    """A checked request."""

    request: PackRequest
    machine: MachineSettings
    tokenizer: TokenizerFile
    settings: dict[str, Any]
    paths: tuple[str, ...]
    """Of the input files; empty for a hub dataset."""
    inputs: tuple[InputState, ...]
    """Their state on the disk now."""

    @property
    def staging(self) -> Path:
        """Folder of unfinished work, which the next preparer continues."""
        final = self.request.output_dir
        places = [
            (state.name, state.num_bytes, state.modified_ns, state.inode, state.changed_ns) for state in self.inputs
        ]
        return final.with_name(f"{final.name}.staging-{_digest([self.settings, places])[:16]}")

    def fingerprint(self, inputs: tuple[InputState, ...]) -> str:
        """Of the settings and of what the inputs hold, whenever and wherever they were written."""
        return _digest([self.settings, [state.content for state in inputs]])

    def _of_these_settings(self) -> PackedManifest | None:
        manifest = read_packed_manifest(self.request.output_dir)
        return manifest if manifest is not None and manifest.settings == self.settings else None

    def finished(self) -> PackedManifest | None:
        """The set, if it exists and was built for this request from files that are unchanged. Reads no input."""
        manifest = self._of_these_settings()
        is_unchanged = manifest and tuple(replace(state, xxh3_128="") for state in manifest.inputs) == self.inputs
        return manifest if manifest and is_unchanged and not self.damage(manifest) else None

    def damage(self, manifest: PackedManifest) -> str:
        """What is wrong with the set's files, in words; empty if nothing."""
        return packed_damage(self.request.output_dir, manifest, reads=self.request.verify)

    def touched(self) -> tuple[PackedManifest, tuple[InputState, ...]] | None:
        """The set, if it was made by this request, and the inputs, if they hold the same as then: reads them.

        None when there is no such set, when it is damaged, or when it is to be replaced. Raises RequestError when the
        inputs hold something else and it is not.
        """
        manifest = self._of_these_settings()
        if manifest is None:
            return None
        if damage := self.damage(manifest):
            LOGGER.warning("%s: %s: the set is built again", self.request.output_dir, damage)
            return None
        now = tuple(replace(state, xxh3_128=_hash(path)) for state, path in zip(self.inputs, self.paths, strict=True))
        if self.fingerprint(now) == manifest.fingerprint:
            return manifest, now
        if self.request.overwrite:
            return None
        changed = [new.name for new, old in zip(now, manifest.inputs, strict=True) if new.content != old.content]
        raise _other_set(self.request.output_dir, f"inputs ({', '.join(changed[:3])} changed since)")


def make_pack_plan(request: PackRequest, machine: MachineSettings) -> PackPlan:
    """Check a request. Raises RequestError, also when the output exists with other settings; writes nothing."""
    if request.sequence_length < 2:
        raise RequestError(f"{request.sequence_length}", where="--sequence_length", needed="2 or more")
    tokenizer = load_tokenizer(request.tokenizer_model, request.eod_token)
    first, last = request.special_ids(tokenizer)
    hub = [name for name in request.inputs if name.startswith(HUB)]
    if hub and len(request.inputs) > 1:
        raise RequestError("a hub dataset among several inputs", where="--input", needed="only the hub dataset")
    sources = [] if hub else resolve_inputs(request.inputs, request.text_documents)
    paths = tuple(source.path for source in sources)
    inputs = tuple(
        InputState(source.relative, source.num_bytes, source.modified_ns, status.st_ino, status.st_ctime_ns)
        for source in sources
        for status in (Path(source.path).stat(),)
    )
    from_hub: list[list[Any]] = [[name, request.hub_split, request.hub_revision] for name in hub]
    settings = {
        "format": PackedManifest.FORMAT,
        "inputs": from_hub or [[state.name, state.num_bytes] for state in inputs],
        "tokenizer": tokenizer.sha256,
        "eod_id": list(last) if len(last) > 1 else next(iter(last), None),
        "bos_id": list(first) if len(first) > 1 else next(iter(first), None),
        **{name: getattr(request, name) for name in SAME},
        "versions": encoder.versions(),
    }
    if evaluations := request.evaluations():
        settings["decontamination"] = evaluations.identity()
    plan = PackPlan(request, machine, tokenizer, settings, paths, inputs)
    _check_output(plan)
    return plan


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _hash(path: str) -> str:
    """The hash of a file's pieces, at the speed of the disk."""
    digest = xxhash.xxh3_128()
    with machine_errors(Path(path), ""), Path(path).open("rb") as file:
        while piece := file.read(BLOCK_BYTES):
            digest.update(xxhash.xxh3_128_digest(piece))
    return digest.hexdigest()


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
            raise RequestError(
                "exists, and is not a packed dataset", where=str(folder), action="give another --output_dir"
            )
        return
    different = [name for name, value in plan.settings.items() if manifest.settings.get(name) != value]
    if different:
        raise _other_set(folder, ", ".join(different))


def _other_set(folder: Path, difference: str) -> RequestError:
    return RequestError(
        f"a packed dataset with other {difference} exists",
        where=str(folder),
        action="give another --output_dir, or --overwrite to replace it once the new one is complete",
    )
