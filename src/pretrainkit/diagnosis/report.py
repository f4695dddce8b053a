"""The report: all findings in one JSON object, and the same as lines for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from statistics import median_high
from typing import TYPE_CHECKING, Any

from pretrainkit.diagnosis.checks import WARN, Check
from pretrainkit.diagnosis.evidence import Evidence
from pretrainkit.diagnosis.findings import Findings, own_times
from pretrainkit.diagnosis.observe import phases
from pretrainkit.units import format_count

if TYPE_CHECKING:
    from pretrainkit.diagnosis.program import Program

BAR_WIDTH = 40
OVERLAP = "Changes overlap: their shares don't add up. Make the first one, and diagnose again."
NO_CAUSE_BELOW = 0.05


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
        "phases": _phases(ranks[0]),
        "functions": _functions(first),
        "summary": summary(findings),
        "causes": [cause.to_json() for cause in findings.causes],
        "options": [cause.to_json() for cause in findings.options],
        "uncertain": findings.uncertain,
        "fine": findings.fine,
        "not_applicable": findings.not_applicable,
        "checks": [asdict(check) for check in static],
        "noise": ranks[0].noise,
        "measuring_s": first.get("measuring_s"),
        "ranks": [
            {
                "rank": rank.rank["rank"],
                "host": rank.rank["host"],
                "own_step_s": median_high(times) if (times := own_times(rank)) else None,
                "phases": _phases(rank),
            }
            for rank in ranks
        ],
        "profile": first.get("profile"),
        "facts": first["facts"],
        "environment": first["environment"],
        "machine": machine,
        "notes": notes,
    }


def summary(findings: Findings) -> str:
    """The outcome in a sentence that nothing below it contradicts."""
    if findings.causes:
        first = findings.causes[0]
        return f"{first.title}: {first.known} {first.share.value:.0%} of the step time. {first.change}"
    if findings.uncertain:
        listed = ", ".join(item["what"] for item in findings.uncertain)
        return f"No cause was shown for certain. Not ruled out: {listed}"
    return f"No cause: every change that was tried saves less than {NO_CAUSE_BELOW:.0%} of the step time"


def _phases(evidence: Evidence) -> dict[str, float]:
    """Share of each phase in the step, by the windows that the causes were measured by."""
    spent: Counter[str] = Counter()
    for seconds in evidence.phases():
        spent.update({name: seconds[name] for name in phases.PHASES if name in seconds})
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
    lines = [f"{made['program']['kind']}  {made['program']['name']}", "", made["summary"], "", "SPEED"]
    lines += [f"  {name:<15}{value}  {note}".rstrip() for name, value, note in numbers(made)]
    lines += ["", "WHERE A STEP'S TIME GOES"]
    lines += [f"  {name:<15}{share:>6.1%}  {'#' * round(share * BAR_WIDTH)}" for name, share in made["phases"].items()]
    for title, listed in (
        ("CAUSES, by the share of the step time that the change saves", made["causes"]),
        ("OPTIONS: faster, but with other numbers, or another batch", made["options"]),
    ):
        lines += ["", title, *_cause_lines(listed)] if listed else []
    lines += [f"  {OVERLAP}"] if len(made["causes"]) > 1 else []
    warned = [check for check in made["checks"] if check["state"] == WARN]
    lines += ["", "TO LOOK AT"] if warned else []
    for check in warned:
        lines += [f"  {check['what']}: {check['found']}"]
        lines += [f"      change: {check['change']}"] if check["change"] else []
    fine = [check for check in made["checks"] if check["state"] != WARN] + made["fine"]
    for title, items in (("UNCERTAIN", made["uncertain"]), ("FINE", fine), ("DOESN'T APPLY", made["not_applicable"])):
        lines += ["", title, *(f"  {item['what']}: {item['found']}" for item in items)] if items else []
    lines += _comparison_lines(made)
    if made["speed"]["ranks"] > 1:
        lines += ["", "RANKS: a step by itself, without waiting for others"]
        lines += [f"  rank {item['rank']} on {item['host']}: {item['own_step_s'] or 0:.4g} s" for item in made["ranks"]]
    lines += [f"note: {note}" for note in made["notes"]]
    return "\n".join(lines)


def numbers(made: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The speed, as name, value and a remark."""
    speed, shown = made["speed"], []
    step = speed["step_time_s"]
    where = f"{speed['ranks']} rank{'s' * (speed['ranks'] > 1)}, {speed['device']}"
    shown.append(("step", f"{step['value']:.4g} s", f"{step['low']:.4g} to {step['high']:.4g} s; {where}"))
    for name, key in (("samples/s", "samples_per_second"), ("tokens/s", "effective_tokens_per_second")):
        if speed[key]:
            value, low, high = (format_count(speed[key][end]) for end in ("value", "low", "high"))
            note = ", without padding" if name == "tokens/s" else ""
            shown.append((name, value, f"{low} to {high}{note}"))
    if speed["mfu"]:
        shown.append(("MFU", f"{speed['mfu']['value']:.1%}", ""))
    padding = speed["padding"]
    if padding:
        found = f"of the tokens, {padding['distinct_shapes']} shapes in {padding['batches']} batches"
        shown.append(("padding", f"{padding['share']:.1%}", found))
    if speed["peak_memory_gib"]:
        shown.append(("peak memory", f"{speed['peak_memory_gib']:.3g} GiB", ""))
    agreed = made.get("metrics_jsonl")
    if agreed and agreed["difference"] is not None:
        recorded = f"{agreed['recorded_step_time_s']:.4g} s"
        shown.append(("metrics.jsonl", recorded, f"for the same steps: step time {agreed['difference']:+.1%}"))
    return shown


def _cause_lines(causes: list[dict[str, Any]]) -> list[str]:
    lines = []
    for number, cause in enumerate(causes, 1):
        share = cause["share"]
        bar = "#" * round(share["value"] * BAR_WIDTH)
        lines += [
            f"  {number}. {share['value']:>6.1%}  [{share['low']:.1%} to {share['high']:.1%}]  {cause['title']}  {bar}",
            f"      seen:   {cause['seen']}",
            f"      change: {cause['change']}",
            f"      gain:   {cause['known']}: {cause['gain']}",
        ]
    return lines


def _comparison_lines(made: dict[str, Any]) -> list[str]:
    lines, against = [], made.get("against")
    if against:
        lines += ["", f"AGAINST {against['experiment']}", f"  {against['verdict']}"]
        lines += [f"  {name}: {old} -> {new}" for name, (old, new) in list(against["changed"].items())[:20]]
    if made.get("checkpoint"):
        cost = made["checkpoint"]
        lines += ["", f"SAVING takes {cost['seconds']:.3g} s every {cost['save_interval']} steps: {cost['share']:.1%}"]
    return lines
