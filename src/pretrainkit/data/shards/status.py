"""What make_shards.py prints: finished shards, and which are missing."""

from __future__ import annotations

import sys

import orjson

from pretrainkit.data.shards.format import ShardRecord, record_to_json, shard_name
from pretrainkit.data.shards.request import ShardPlan, check_set
from pretrainkit.units import format_bytes, format_count


def print_records(records: list[ShardRecord], *, as_json: bool) -> None:
    """A line a shard, or all records as a JSON list."""
    if as_json:
        text = orjson.dumps([record_to_json(record) for record in records], option=orjson.OPT_INDENT_2).decode()
        sys.stdout.write(text + "\n")
        return
    for record in records:
        sys.stdout.write(
            f"{shard_name(record.shard_id)}: {record.num_records} records in = {record.num_samples} samples +"
            f" {record.num_empty} empty + {record.num_rejected} rejected; {format_count(record.num_tokens)} tokens"
            f" ({record.num_tokens}), {format_bytes(record.tar_bytes)}, {record.elapsed_s:.1f} s,"
            f" {record.tokenizer.engine}\n"
        )


def print_status(plan: ShardPlan, *, as_json: bool) -> int:
    """List what is complete, missing and stale; 1 unless all shards are complete."""
    records = check_set(plan)
    wanted = range(plan.num_shards)
    missing = [number for number in wanted if number not in records]
    stale = [number for number in wanted if number in records and not plan.is_current(records[number])]
    if as_json:
        status = {
            "num_shards": plan.num_shards,
            "missing": missing,
            "stale": stale,
            "num_samples": sum(record.num_samples for record in records.values()),
            "num_tokens": sum(record.num_tokens for record in records.values()),
        }
        sys.stdout.write(orjson.dumps(status).decode() + "\n")
    else:
        complete = plan.num_shards - len(missing) - len(stale)
        sys.stdout.write(f"{complete} of {plan.num_shards} shards are complete\n")
        if missing:
            sys.stdout.write(f"missing: {_ranges(missing)}\n")
        if stale:
            sys.stdout.write(f"made from input that has changed since: {_ranges(stale)}\n")
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
