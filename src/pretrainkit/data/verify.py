"""`inspect_data.py verify`: whether prepared data of any form is complete, and holds the bytes that were written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pretrainkit.data.documents import documents_kind
from pretrainkit.data.indexed.pair_set import find_pairs
from pretrainkit.data.indexed.verify import Verification, verify
from pretrainkit.data.packed.format import PackedDocuments, packed_damage, read_packed_manifest
from pretrainkit.data.report import Report
from pretrainkit.data.shards.format import ShardRecord, read_records, sample_dtype, shard_name
from pretrainkit.data.shards.shard_set import missing_shards, shard_damage
from pretrainkit.data.shards.urls import expand, is_url
from pretrainkit.data.tokens.tokenizer import load_tokenizer
from pretrainkit.errors import DataError, RequestError


def report_verification(data: list[str], tokenizer_model: str | None) -> Report:
    """What is wrong with datasets; exit code 1 if anything is."""
    num_ids = load_tokenizer(tokenizer_model).num_ids if tokenizer_model else None
    found = [one for path in data for one in _verify(path, num_ids)]

    def lines() -> Iterator[str]:
        for one in found:
            state = "BAD" if one.problems else "good"
            yield f"{one.prefix}: {state}, {one.num_documents} documents, {one.num_tokens} tokens"
            yield from (f"  {line}" for line in (*one.problems, *one.notes))

    return Report([vars(one) for one in found], lines(), int(any(one.problems for one in found)))


def _verify(path: str, num_ids: int | None) -> list[Verification]:
    kind = documents_kind(path)
    if kind is None:
        return [verify(prefix, num_ids) for prefix in find_pairs(path)]
    try:
        return [_verify_packed(Path(path)) if kind is PackedDocuments else _verify_shards(path)]
    except DataError as error:
        return [Verification(Path(path), problems=[str(error)])]


def _verify_shards(path: str) -> Verification:
    if is_url(path):
        raise RequestError("shards behind a URL", where=path, action="verify a copy: training makes one, and checks it")
    problems = []
    if Path(path).is_dir():
        records = read_records(Path(path))
        tars = {Path(path) / f"{shard_name(number)}.tar": record for number, record in sorted(records.items())}
        problems += [f"{shard_name(number)} is missing" for number in missing_shards(records)]
    else:
        names = [Path(name.removeprefix("file:")) for name in expand(path)]
        found = {name: ShardRecord.read(name.with_suffix(".json")) for name in names}
        problems += [f"{name.stem}.json is missing" for name, record in found.items() if record is None]
        tars = {name: record for name, record in found.items() if record is not None}
    for tar, record in tars.items():
        problem = shard_damage(tar, record, reads=True) or _table_problem(tar, record)
        problems += [problem] if problem else []
    return Verification(
        Path(path),
        num_tokens=sum(record.num_tokens for record in tars.values()),
        num_documents=sum(record.num_samples for record in tars.values()),
        has_manifest=True,
        problems=problems,
    )


def _table_problem(tar: Path, record: ShardRecord) -> str:
    """How the table of samples contradicts the record, in words."""
    if not record.num_samples:
        return ""
    num_tokens = int(np.fromfile(tar.with_suffix(".samples"), sample_dtype(record))["num_tokens"].sum(dtype=np.int64))
    if num_tokens == record.num_tokens:
        return ""
    return f"{tar.stem}.samples: {num_tokens} tokens, its record says {record.num_tokens}"


def _verify_packed(folder: Path) -> Verification:
    manifest = read_packed_manifest(folder)
    assert manifest is not None
    problem = packed_damage(folder, manifest, reads=True)
    return Verification(
        folder,
        num_tokens=manifest.num_tokens,
        num_documents=manifest.documents["num_documents"],
        has_manifest=True,
        problems=[problem] if problem else [],
    )
