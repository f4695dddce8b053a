"""A request for token shards, checked before any work: the input of each shard, and what may differ in a set."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrainkit.data.readers import work_items
from pretrainkit.data.readers.folders import warn_of_left_out
from pretrainkit.data.readers.inputs import resolve_inputs
from pretrainkit.data.readers.source import Source
from pretrainkit.data.readers.work_items import WorkItem
from pretrainkit.data.report import Report
from pretrainkit.data.request import TextRequest, warn_without_eod
from pretrainkit.data.shards.blocks import ShardTask
from pretrainkit.data.shards.format import ShardRecord, read_records, shard_name
from pretrainkit.data.shards.shard_set import shard_damage
from pretrainkit.data.tokens.tokenizer import TokenizerFile, load_tokenizer
from pretrainkit.errors import RequestError
from pretrainkit.units import format_ranges

MAX_SHARDS = 100_000
"""Shard names have five digits."""
SAME = (
    *("special_tokens_in_text", "json_key", "text_documents", "on_error", "max_document_bytes"),
    *("ids_format", "has_text"),
)
"""Fields of the request that must be equal in all shards of a set."""


@dataclass(frozen=True)
class ShardRequest(TextRequest):
    """The flags of make_shards.py."""

    inputs: tuple[str, ...]
    output_dir: Path
    model_id: str
    num_shards: int | None = None
    """None: a shard per input file."""
    json_key: str = "text"
    ids_format: str = "json"
    has_text: bool = True
    special_tokens: str = field(default="template", kw_only=True)
    workers: int = 1
    verify: bool = False
    """Read finished shards, too: their sizes are looked at in any case."""


@dataclass(frozen=True)
class ShardPlan:
    """A checked request for all shards."""

    request: ShardRequest
    tokenizer: TokenizerFile
    sources: list[Source]
    num_shards: int
    task: ShardTask
    """What workers do."""
    settings: dict[str, Any]
    """What must be equal in all shards of a set."""
    num_files_left_out: int
    _items: list[WorkItem]

    def items(self, shard_id: int) -> list[WorkItem]:
        """The work items of one shard, in order."""
        if self.request.num_shards is None:
            source = self.sources[shard_id]
            parts = source.split(shard_id, (self.request.json_key,))
            return [WorkItem(0, (part,), source.is_stream) for part in parts]
        begin, end = work_items.shard(self._items, shard_id, self.num_shards)
        return self._items[begin:end]

    def path(self, shard_id: int, suffix: str) -> Path:
        """`OUTPUT_DIR/shard-00003<suffix>`."""
        return self.request.output_dir / f"{shard_name(shard_id)}{suffix}"

    def is_current(self, record: ShardRecord) -> bool:
        """Whether a finished shard was made by these settings from the files as they are now."""
        used = {part.source for item in self.items(record.shard_id) for part in item.ranges}
        now = {(s.relative, s.num_bytes, s.modified_ns) for s in (self.sources[number] for number in used)}
        then = {(self._relative(entry.path), entry.num_bytes, entry.modified_ns) for entry in record.inputs}
        return record.settings == self.settings and now == then

    def damage(self, record: ShardRecord) -> str:
        """What is wrong with a finished shard's files, in words; empty if nothing."""
        return shard_damage(self.path(record.shard_id, ".tar"), record, reads=self.request.verify)

    def _relative(self, path: str) -> str:
        """A file's path below the input folder, which may have been moved or given in another form."""
        ends = [source.relative for source in self.sources if f"/{path}".endswith(f"/{source.relative}")]
        return max(ends, key=len, default=path)


def make_shard_plan(request: ShardRequest) -> ShardPlan:
    """Check a request and plan its shards. Raises RequestError; writes nothing."""
    if request.workers < 1:
        raise RequestError(f"{request.workers}", where="--workers", needed="1 or more")
    if request.num_shards is not None and not 1 <= request.num_shards <= MAX_SHARDS:
        raise RequestError(f"{request.num_shards}", where="--num_shards", needed=f"1 to {MAX_SHARDS}")
    left_out: list[str] = []
    sources = resolve_inputs(request.inputs, request.text_documents, left_out)
    warn_of_left_out(left_out)
    tokenizer = load_tokenizer(request.model_id, request.eod_token)
    first, last = request.special_ids(tokenizer)
    warn_without_eod(last)
    num_shards = request.num_shards or len(sources)
    if num_shards > MAX_SHARDS:
        raise RequestError(
            f"{num_shards} files",
            needed=f"at most {MAX_SHARDS} shards",
            action="give --num_shards",
            where="--input_dir",
        )
    keys = (request.json_key,)
    items = work_items.cut(sources, [0] * len(sources), keys) if request.num_shards else []
    listing = hashlib.sha256("\n".join(source.relative for source in sources).encode()).hexdigest()
    settings = {
        "num_shards": num_shards,
        "split": "shards of about equal size" if request.num_shards else "a shard per file",
        "input_files": listing,
        "tokenizer": tokenizer.sha256,
        "first_ids": list(first),
        "last_ids": list(last),
        **{name: getattr(request, name) for name in SAME},
    }
    if evaluations := request.evaluations():
        settings["decontamination"] = evaluations.identity()
    if request.num_shards:
        settings["cut"] = work_items.fingerprint(items)
    task = ShardTask(
        first,
        last,
        tokenizer.num_ids,
        request.ids_format,
        request.has_text,
        request.rules(*keys),
        tuple(tokenizer.special_tokens),
    )
    return ShardPlan(request, tokenizer, sources, num_shards, task, settings, len(left_out), items)


def check_set(plan: ShardPlan) -> dict[int, ShardRecord]:
    """The finished shards in the output folder. Raises RequestError when they belong to another set."""
    records = read_records(plan.request.output_dir)
    for shard_id, record in records.items():
        different = [name for name, value in plan.settings.items() if record.settings.get(name) != value]
        if not different:
            continue
        changes = ", ".join(
            f"{name} {record.settings.get(name)!r} there, {plan.settings[name]!r} here" for name in different
        )
        if different == ["cut"]:
            changes = "files had other sizes, so records belong to other shards now"
        raise RequestError(
            f"{shard_name(shard_id)} was made with other settings: {changes}",
            where=str(plan.request.output_dir),
            action="make a new set in another --output_dir, or use the same settings as before",
        )
    return records


def report_status(plan: ShardPlan) -> Report:
    """Which shards are complete, missing, damaged and stale; exit code 1 unless all are complete."""
    records = check_set(plan)
    missing = [number for number in range(plan.num_shards) if number not in records]
    stale = [number for number, record in sorted(records.items()) if not plan.is_current(record)]
    damaged = [number for number, record in sorted(records.items()) if number not in stale and plan.damage(record)]
    value = {
        "num_shards": plan.num_shards,
        "missing": missing,
        "damaged": damaged,
        "stale": stale,
        "num_samples": sum(record.num_samples for record in records.values()),
        "num_tokens": sum(record.num_tokens for record in records.values()),
    }
    num_complete = plan.num_shards - len(missing) - len(damaged) - len(stale)
    lines = [f"{num_complete} of {plan.num_shards} shards are complete"]
    listed = {"missing": missing, "damaged": damaged, "made from input that has changed since": stale}
    for found, numbers in listed.items():
        if numbers:
            lines.append(f"{found}: {format_ranges(numbers)}")
    return Report(value, lines, int(bool(missing or damaged or stale)))


def check_shard_id(shard_id: int, plan: ShardPlan) -> None:
    """Raises RequestError for a shard that the set doesn't have."""
    if not 0 <= shard_id < plan.num_shards:
        what = f"{plan.num_shards} shards" if plan.request.num_shards else f"{plan.num_shards} input files"
        raise RequestError(
            f"shard {shard_id} of {what}",
            where="--shard_id",
            needed=f"0 to {plan.num_shards - 1}",
            action=f"run an array of 0-{plan.num_shards - 1} (Grid Engine: 1-{plan.num_shards}), or give --num_shards",
        )
