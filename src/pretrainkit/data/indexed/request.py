"""What to preprocess and how, checked and worked out before any work: tokenizer, files, outputs, pieces."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pretrainkit.data.decontamination.evaluations import Evaluations
from pretrainkit.data.indexed.format import bin_path, check_output_prefix, optimal_dtype
from pretrainkit.data.indexed.manifest import Manifest, SetPart, manifest_path, read_manifest
from pretrainkit.data.names import STATE_SUFFIX
from pretrainkit.data.readers import work_items
from pretrainkit.data.readers.compressed import Compressed
from pretrainkit.data.readers.folders import warn_of_left_out
from pretrainkit.data.readers.inputs import resolve_inputs, stem_of
from pretrainkit.data.readers.records import RecordRules
from pretrainkit.data.readers.source import BLOCK_BYTES, Source
from pretrainkit.data.readers.text import TextFile, TextLines
from pretrainkit.data.readers.work_items import WorkItem
from pretrainkit.data.request import TextRequest, warn_without_eod
from pretrainkit.data.tokens import encoder
from pretrainkit.data.tokens.tokenizer import TokenizerFile, load_tokenizer
from pretrainkit.errors import RequestError
from pretrainkit.files import nearest_existing
from pretrainkit.logs import get_logger
from pretrainkit.units import format_bytes

LOGGER = get_logger(__name__)
SAME = (
    "json_keys",
    "per_file",
    "append_eod",
    "add_bos",
    "special_tokens_in_text",
    "text_documents",
    "max_document_bytes",
)
"""Flags that must be equal in all parts of a set."""


@dataclass(frozen=True)
class Request(TextRequest):
    """The flags of preprocess_data.py."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_model: str
    json_keys: tuple[str, ...] = ("text",)
    label_key: str = ""
    dtype: str = "auto"
    """`auto`, `uint16` or `int32`."""
    workers: int = 1
    per_file: bool = False
    shard: tuple[int, int] | None = None
    resume: bool = True
    log_interval: int = 1000


@dataclass(frozen=True)
class OutputNames:
    """Final names of one output."""

    prefixes: list[str]
    """Per key, without .bin and .idx."""
    rejects: str
    sources: list[int]
    part: SetPart | None = None


@dataclass(frozen=True)
class Plan:
    """A checked request."""

    request: Request
    tokenizer: TokenizerFile
    sources: list[Source]
    outputs: list[OutputNames]
    items: dict[int, WorkItem]
    dtype: np.dtype
    state_folder: Path
    first_ids: tuple[int, ...]
    """Ids that begin every document."""
    last_ids: tuple[int, ...]
    """Ids that end every document."""
    num_files_left_out: int
    evaluations: Evaluations | None = None
    decontamination: dict[str, Any] = field(default_factory=dict)
    """What identifies the evaluation sets, and what happens to documents that overlap with them."""

    @property
    def rules(self) -> RecordRules:
        """Which records are good."""
        return self.request.rules(*self.request.json_keys, label_key=self.request.label_key)

    @property
    def columns(self) -> tuple[str, ...]:
        """What a key's documents are written as, in this order: the files' suffixes."""
        return ("bin", "idx", "labels") if self.request.label_key else ("bin", "idx")

    def useful_workers(self) -> int:
        """More than these would have less than a piece of text each."""
        return 1 + sum(item.weight for item in self.items.values()) // BLOCK_BYTES

    def first_line(self, source: int) -> int:
        """Lines of a file that belong to earlier jobs of an array."""
        ranges = (part for item in self.items.values() for part in item.ranges if part.source == source)
        return self.sources[source].lines_before(next(ranges).begin)

    def flags(self) -> dict[str, Any]:
        """All flags that decide the output, for the manifest."""
        kept = asdict(self.request)
        for name in ("workers", "resume", "overwrite", "log_interval", "max_rejected"):
            del kept[name]
        if not self.evaluations:
            kept = {name: value for name, value in kept.items() if not name.startswith("decontaminate")}
        if not self.request.label_key:
            del kept["label_key"]
        if self.request.special_tokens == "none":
            del kept["special_tokens"]
        return kept

    def identity(self) -> dict[str, Any]:
        """What must be equal for unfinished work to be continued."""
        flags = self.flags()
        for name in ("inputs", "tokenizer_model", "decontaminate"):
            flags.pop(name, None)
        return {
            **flags,
            "format": Manifest.FORMAT,
            "block_bytes": BLOCK_BYTES,
            "tokenizer": self.tokenizer.sha256,
            "eod_id": self.tokenizer.eod_id if self.request.append_eod else None,
            "decontamination": self.decontamination,
            "versions": encoder.versions(),
            "sets": [output.part and output.part.set_id for output in self.outputs[:1]],
            "inputs": [[source.path, source.num_bytes, source.modified_ns] for source in self.sources],
        }


def make_plan(request: Request, tokenizer: TokenizerFile | None = None) -> Plan:
    """Check a request and work out what it means. Raises RequestError; writes nothing.

    `tokenizer` is the request's, if it was read already.
    """
    _check_flags(request)
    tokenizer = tokenizer or load_tokenizer(request.tokenizer_model, request.eod_token)
    first, last = request.special_ids(tokenizer)
    warn_without_eod(last)
    dtype = optimal_dtype(tokenizer.num_ids) if request.dtype == "auto" else np.dtype(request.dtype)
    if max((*first, *last), default=0) > np.iinfo(dtype).max:
        raise RequestError("EOD or BOS has an id that 16 bits can't hold", where="--dtype uint16", needed="int32")
    left_out: list[str] = []
    sources = resolve_inputs(request.inputs, request.text_documents, left_out)
    warn_of_left_out(left_out)
    rules = request.rules(*request.json_keys, label_key=request.label_key)
    _check_has_labels(rules, sources)
    prefix, job = request.output_prefix, ""
    evaluations = request.evaluations()
    decontamination = evaluations.identity() if evaluations else {}
    ends = [tokenizer.eod_id if request.append_eod else None, tokenizer.bos_id if request.add_bos else None]
    same = [*(getattr(request, name) for name in SAME), tokenizer.sha256, *ends, dtype.name]
    same += [value for value in (decontamination, request.label_key) if value]
    same += ["template"] if request.special_tokens == "template" else []
    if request.shard is not None:
        job = f".shard-{request.shard[0]:05d}-of-{request.shard[1]:05d}"
    parts: list[SetPart | None]
    if request.per_file:
        root, bases = _bases_per_file(prefix, sources)
        # Without their sizes: a file that was corrected is preprocessed again alone.
        set_id = _digest([*same, [source.relative for source in sources]])
        parts = [SetPart(i, len(bases), set_id, os.path.relpath(base, root)) for i, base in enumerate(bases)]
        if request.shard is not None:  # jobs of an array share out files
            index, count = request.shard
            sources, bases, parts = sources[index::count], bases[index::count], parts[index::count]
        groups = [[number] for number in range(len(sources))]
    else:
        bases, parts, groups = [prefix + job], [None], [[*range(len(sources))]]
    output_of_sources = [output for output, group in enumerate(groups) for _ in group]
    items = dict(enumerate(work_items.cut(sources, output_of_sources, rules.columns)))
    if request.shard is not None and not request.per_file:
        parts = [SetPart(*request.shard, _digest([*same, work_items.fingerprint([*items.values()])]))]
        items = {number: items[number] for number in range(*work_items.shard([*items.values()], *request.shard))}
    outputs = [
        OutputNames([f"{base}_{key}_document" for key in request.json_keys], f"{base}.rejects.jsonl", group, part)
        for base, group, part in zip(bases, groups, parts, strict=True)
    ]
    state_folder = Path(f"{prefix.rstrip('/')}{job}{STATE_SUFFIX}")
    return Plan(
        request=request,
        tokenizer=tokenizer,
        sources=sources,
        outputs=outputs,
        items=items,
        dtype=dtype,
        state_folder=state_folder,
        first_ids=first,
        last_ids=last,
        num_files_left_out=len(left_out),
        evaluations=evaluations,
        decontamination=decontamination,
    )


def _digest(value: list[Any]) -> str:
    return hashlib.sha256(orjson.dumps(value)).hexdigest()


def _is_folder(prefix: str) -> bool:
    return prefix.endswith("/") or Path(prefix).is_dir()


def _bases_per_file(prefix: str, sources: list[Source]) -> tuple[Path, list[str]]:
    """The output folder, and a prefix in it or below for each file.

    A folder takes the files' names below it; any other prefix is put before their names.
    """
    if _is_folder(prefix):
        root, bases = Path(prefix), [str(Path(prefix) / stem_of(source)) for source in sources]
    else:
        root, bases = Path(prefix).parent, [f"{prefix}_{stem_of(source).replace(os.sep, '_')}" for source in sources]
    repeated = [base for base, count in Counter(bases).items() if count > 1]
    if repeated:
        raise RequestError(
            f"several inputs would be written to {repeated[0]}",
            where="--per-file",
            action="name their common folder as --input, so that paths below it distinguish them",
        )
    return root, bases


def _check_flags(request: Request) -> None:
    problems: list[RequestError] = []
    if not (request.per_file and _is_folder(request.output_prefix)):
        with RequestError.collected(problems):
            check_output_prefix(request.output_prefix)
    if request.workers < 1:
        problems.append(RequestError(f"{request.workers}", where="--workers", needed="1 or more"))
    if len(set(request.json_keys)) < len(request.json_keys):
        problems.append(RequestError("a key is named twice", where="--json-keys"))
    if request.text_documents == "file" and len(request.json_keys) > 1:
        problems.append(RequestError("a text file has one text", where="--json-keys", needed="one key"))
    if request.label_key in request.json_keys:
        problems.append(RequestError(f"{request.label_key!r} is the text", where="--label-key", needed="another key"))
    if any("/" in key for key in request.json_keys):
        problems.append(RequestError("a key holds '/', which can't be part of a file name", where="--json-keys"))
    RequestError.raise_all(problems)


def _check_has_labels(rules: RecordRules, sources: list[Source]) -> None:
    if not rules.label_key:
        return
    for source in sources:
        kind = source.text if isinstance(source, Compressed) else source
        if isinstance(kind, TextLines | TextFile):
            raise RequestError(
                f"{source.path} is text, which has no {rules.label_key!r}",
                where="--label-key",
                needed="JSON Lines or tables",
                action="leave it out: the inputs' names are labels then",
            )


def _files_of(plan: Plan, outputs: list[OutputNames]) -> list[Path]:
    kinds = (*plan.columns, "manifest.json")
    return [Path(f"{prefix}.{kind}") for output in outputs for prefix in output.prefixes for kind in kinds]


def is_written(plan: Plan) -> bool:
    """Whether all outputs are there, made by this very request from files of the same sizes, not changed since."""
    if not all(path.exists() for path in _files_of(plan, plan.outputs)):
        return False
    flags = orjson.loads(orjson.dumps(plan.flags()))
    sources = {source.path: source for source in plan.sources}
    for prefix in (prefix for output in plan.outputs for prefix in output.prefixes):
        manifest, written_ns = read_manifest(prefix), manifest_path(prefix).stat().st_mtime_ns
        if manifest is None or (manifest.flags, manifest.tokenizer.sha256) != (flags, plan.tokenizer.sha256):
            return False
        if bin_path(prefix).stat().st_size != manifest.bin_bytes:
            return False
        for file in manifest.inputs:
            source = sources.get(file.path)
            if source is None or source.num_bytes != file.num_bytes or source.modified_ns > written_ns:
                return False
    return True


def check_outputs(plan: Plan, committed: int) -> None:
    """Refuse to touch finished outputs, unless --overwrite; the first `committed` ones are this very run's."""
    existing = [str(path) for path in _files_of(plan, plan.outputs[committed:]) if path.exists()]
    if existing and not plan.request.overwrite:
        more = f" and {len(existing) - 3} more" if len(existing) > 3 else ""
        raise RequestError(
            f"output exists: {', '.join(existing[:3])}{more}",
            action="give another --output-prefix, or --overwrite to replace it once the new one is complete",
        )
    wanted = sum(item.weight for item in plan.items.values()) * plan.dtype.itemsize // 4
    folder = nearest_existing(plan.state_folder.absolute().parent)
    free = shutil.disk_usage(folder).free
    if free < wanted:
        LOGGER.warning(
            "%s has %s free; this output may need about %s", folder, format_bytes(free), format_bytes(wanted)
        )
