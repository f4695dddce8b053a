"""What make_shards.py prints: the records of finished shards, or which shards are missing."""

from __future__ import annotations

import json

from pretrainkit.data.shards.format import ShardRecord, record_to_json, shard_name
from pretrainkit.data.shards.request import ShardPlan, check_set
from pretrainkit.units import format_bytes, format_count


def print_records(records: list[ShardRecord], *, as_json: bool) -> None:
    """Print a line per shard, or all records as a JSON list."""
    if as_json:
        print(json.dumps([record_to_json(record) for record in records], indent=2, ensure_ascii=False))
        return
    for record in records:
        print(
            f"{shard_name(record.shard_id)}: {record.num_records} records in = {record.num_samples} samples +"
            f" {record.num_empty} empty + {record.num_rejected} rejected; {format_count(record.num_tokens)} tokens"
            f" ({record.num_tokens}), {format_bytes(record.tar_bytes)}, {record.elapsed_s:.1f} s,"
            f" {record.tokenizer.engine}"
        )


def print_status(plan: ShardPlan, *, as_json: bool) -> int:
    """Print what is complete, missing and stale; gives exit code 1 unless all shards are complete."""
    records = check_set(plan)
    missing = [number for number in range(plan.num_shards) if number not in records]
    stale = [number for number, record in sorted(records.items()) if not plan.is_current(record)]
    if as_json:
        status = {
            "num_shards": plan.num_shards,
            "missing": missing,
            "stale": stale,
            "num_samples": sum(record.num_samples for record in records.values()),
            "num_tokens": sum(record.num_tokens for record in records.values()),
        }
        print(json.dumps(status))
    else:
        print(f"{plan.num_shards - len(missing) - len(stale)} of {plan.num_shards} shards are complete")
        if missing:
            print(f"missing: {_ranges(missing)}")
        if stale:
            print(f"made from input that has changed since: {_ranges(stale)}")
    return 1 if missing or stale else 0


def _ranges(numbers: list[int]) -> str:
    """`0-3,7`, as schedulers take it for `--array`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
