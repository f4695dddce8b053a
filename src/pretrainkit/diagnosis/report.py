"""The report: all findings in one JSON object, and the same as lines for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from statistics import median_high
from typing import TYPE_CHECKING, Any

from pretrainkit.diagnosis.causes import Findings, own_times
from pretrainkit.diagnosis.checks import WARN, Check
from pretrainkit.diagnosis.evidence import Evidence
from pretrainkit.diagnosis.observe import phases
from pretrainkit.units import format_count

if TYPE_CHECKING:
    from pretrainkit.diagnosis.program import Program

BAR_WIDTH = 24


def build(
    *,
    program: Program,
    ranks: list[Evidence],
    speed: dict[str, Any],
    findings: Findings,
    static: list[Check],
    machine: dict[str, Any],
    notes: list[str],
) -> dict[str, Any]:
    """The report of one diagnosis, ready for JSON."""
    first = ranks[0].rank
    return {
        "program": {"kind": program.kind, "name": program.name},
        "speed": speed,
        "phases": _phases(first),
        "functions": _functions(first),
        "causes": [cause.to_json() for cause in findings.causes],
        "options": [cause.to_json() for cause in findings.options],
        "uncertain": findings.uncertain,
        "fine": findings.fine,
        "checks": [asdict(check) for check in static],
        "noise": ranks[0].noise,
        "ranks": [
            {
                "rank": rank.rank["rank"],
                "host": rank.rank["host"],
                "own_step_s": median_high(times) if (times := own_times(rank)) else None,
                "phases": _phases(rank.rank),
            }
            for rank in ranks
        ],
        "profile": first.get("profile"),
        "attention_alone": first.get("attention_alone", []),
        "loader_alone": first.get("loader_alone", []),
        "timeline": [{"rank": rank.rank["rank"], "events": rank.rank["observed"]["events"]} for rank in ranks],
        "facts": first["facts"],
        "environment": first["environment"],
        "machine": machine,
        "notes": notes,
    }


def _phases(rank: dict[str, Any]) -> dict[str, float]:
    """Share of each phase in the step; on a GPU measured with the device waited for at each border."""
    spent = {name: seconds for name, seconds in rank["observed"]["phases_s"].items() if name in phases.PHASES}
    total = sum(spent.values()) or math.inf
    return {name: spent[name] / total for name in phases.PHASES if name in spent}


def _functions(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """The user's functions that were seen most, with their share of the time."""
    counts: Counter[tuple[str, str]] = Counter()
    for sample in rank["observed"]["samples"]:
        counts[sample["phase"], sample["where"]] += sample["count"]
    total = sum(counts.values()) or 1
    return [{"phase": phase, "where": where, "share": count / total} for (phase, where), count in counts.most_common(8)]


def text(made: dict[str, Any]) -> str:
    """The report for a terminal, without a newline at the end."""
    speed = made["speed"]
    lines = [f"{made['program']['kind']}  {made['program']['name']}", "", "SPEED", *_speed_lines(made), ""]
    lines += ["WHERE A STEP'S TIME GOES"]
    lines += [
        f"  {name:<14}{share:>6.1%}  {'#' * round(share * BAR_WIDTH * 2)}" for name, share in made["phases"].items()
    ]
    lines += ["", "CAUSES, by the share of the step time that they cost"]
    lines += _cause_lines(made["causes"]) or [f"  none over 2% (noise of this machine {made['noise']:.1%})"]
    if made["options"]:
        lines += ["", "OPTIONS: faster, but with other numbers, memory or batch", *_cause_lines(made["options"])]
    if made["uncertain"]:
        lines += ["", "UNCERTAIN"]
        lines += [f"  {item['what']}: {item['found']}" for item in made["uncertain"]]
    warned = [check for check in made["checks"] if check["state"] == WARN]
    if warned:
        lines += ["", "TO LOOK AT"]
        for check in warned:
            lines += [f"  {check['what']}: {check['found']}"]
            lines += [f"      change: {check['change']}"] if check["change"] else []
    lines += ["", "CHECKED AND FINE"]
    lines += [f"  {check['what']}: {check['found']}" for check in made["checks"] if check["state"] != WARN]
    lines += [f"  {item['what']}: {item['found']}" for item in made["fine"]]
    lines += _comparison_lines(made)
    if speed["ranks"] > 1:
        lines += ["", "RANKS: a step by itself, without waiting for others"]
        lines += [f"  rank {item['rank']} on {item['host']}: {item['own_step_s'] or 0:.4g} s" for item in made["ranks"]]
    lines += [f"note: {note}" for note in made["notes"]]
    return "\n".join(lines)


def _speed_lines(made: dict[str, Any]) -> list[str]:
    speed = made["speed"]
    step = speed["step_time_s"]
    lines = [
        f"  step           {step['value']:.4g} s  [{step['low']:.4g} to {step['high']:.4g}], "
        f"{speed['ranks']} rank(s), {speed['device']}"
    ]
    for name, key in (("samples/s", "samples_per_second"), ("tokens/s", "effective_tokens_per_second")):
        if speed[key]:
            value, low, high = (format_count(speed[key][end]) for end in ("value", "low", "high"))
            note = ", padding not counted" if name == "tokens/s" else ""
            lines.append(f"  {name:<15}{value}  [{low} to {high}]{note}")
    if speed["mfu"]:
        lines.append(f"  MFU            {speed['mfu']['value']:.1%}")
    padding = speed["padding"]
    if padding:
        lines.append(
            f"  padding        {padding['share']:.1%} of the tokens, {padding['distinct_shapes']} shapes in "
            f"{padding['batches']} batches"
        )
    agreed = made.get("metrics_jsonl")
    if agreed and agreed["difference"] is not None:
        lines.append(
            f"  metrics.jsonl  {agreed['recorded_step_time_s']:.4g} s for the same steps ({agreed['difference']:+.1%})"
        )
    return lines


def _cause_lines(causes: list[dict[str, Any]]) -> list[str]:
    lines = []
    for number, cause in enumerate(causes, 1):
        share = cause["share"]
        bar = "#" * round(max(share["value"], 0) * BAR_WIDTH)
        lines += [
            f"  {number}. {share['value']:>6.1%}  [{share['low']:.1%} to {share['high']:.1%}]  {cause['title']}  {bar}",
            f"      seen:   {cause['why']}",
            f"      change: {cause['change']}",
            f"      gain:   {cause['gain']}",
        ]
    return lines


def _comparison_lines(made: dict[str, Any]) -> list[str]:
    lines = []
    baseline, against = made.get("baseline"), made.get("against")
    if baseline:
        lines += [
            "",
            f"BASELINE {baseline['name']}, {baseline['layers']} layers, micro batch {baseline['micro_batch_size']}",
            f"  {baseline['ratio']:.2f} of its {baseline['tokens_per_second']:,} tokens/s ({baseline['versions']})",
        ]
    if against:
        lines += ["", f"AGAINST {against['experiment']}", f"  {against['verdict']}"]
        lines += [f"  {name}: {old} -> {new}" for name, (old, new) in list(against["changed"].items())[:20]]
    if made.get("checkpoint"):
        cost = made["checkpoint"]
        lines += ["", f"SAVING takes {cost['seconds']:.3g} s every {cost['save_interval']} steps: {cost['share']:.1%}"]
    return lines
