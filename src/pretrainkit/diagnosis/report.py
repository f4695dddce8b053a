"""The report: all findings in one JSON object, and the same as lines for a terminal; `html.py` makes a page of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from statistics import median_high
from typing import Any, NamedTuple

from pretrainkit.diagnosis.checks import STATES, UNCERTAIN, Check
from pretrainkit.diagnosis.evidence import Evidence
from pretrainkit.diagnosis.findings import LITTLE, Findings, own_times
from pretrainkit.diagnosis.observe.phases import PHASES
from pretrainkit.diagnosis.program import Program
from pretrainkit.units import format_count

FORMAT_VERSION = 3
BAR_WIDTH = 40
OVERLAP = "Changes overlap: their shares don't add up. Make the first one, and diagnose again."
MOST_FUNCTIONS = 8


class Table(NamedTuple):
    """Rows under a title, with a sentence about them."""

    title: str
    about: str
    head: list[str]
    rows: list[list[str]]


def build(
    *, program: Program, ranks: list[Evidence], speed: dict[str, Any], findings: Findings, static: list[Check]
) -> dict[str, Any]:
    """The report of one diagnosis, ready for JSON."""
    first = ranks[0].rank
    checks = sorted([*findings.checks, *static], key=lambda check: STATES.index(check.state))
    return {
        "format_version": FORMAT_VERSION,
        "program": {"kind": program.kind, "name": program.name},
        "speed": speed,
        "phases": _phases(ranks[0]),
        "functions": _functions(first),
        "summary": summary(findings),
        "causes": [asdict(cause) for cause in findings.causes],
        "options": [asdict(cause) for cause in findings.options],
        "checks": [asdict(check) for check in checks],
        "measuring_s": first.get("measuring_s"),
        "ranks": [
            {
                "rank": rank.rank["rank"],
                "host": rank.rank["host"],
                "own_step_s": median_high(own_times(rank)),
                "phases": _phases(rank),
            }
            for rank in ranks
        ],
        "facts": first["facts"],
    }


def summary(findings: Findings) -> str:
    """The outcome in a sentence that nothing below it contradicts."""
    if findings.causes:
        first = findings.causes[0]
        return f"{first.title}: {first.known} {first.share.value:.0%} of the step time. {first.change}"
    if listed := [check.what for check in findings.checks if check.state == UNCERTAIN]:
        return f"No cause was shown for certain. Not ruled out: {', '.join(listed)}"
    return f"No cause: every change that was tried saves less than {LITTLE:.0%} of the step time"


def _phases(evidence: Evidence) -> dict[str, float]:
    """Share of each phase in the step, by the windows that the causes were measured by."""
    spent: Counter[str] = Counter()
    for seconds in evidence.phases():
        spent.update(seconds)
    total = sum(spent.values()) or math.inf
    return {name: spent[name] / total for name in PHASES if name in spent}


def _functions(rank: dict[str, Any]) -> list[dict[str, Any]]:
    """The user's functions that were seen most, with their share of the time."""
    counts: Counter[tuple[str, str]] = Counter()
    for sample in rank["observed"]["samples"]:
        counts[sample["phase"], sample["where"]] += sample["count"]
    most = counts.most_common(MOST_FUNCTIONS)
    return [{"phase": phase, "where": where, "share": count / counts.total()} for (phase, where), count in most]


def numbers(made: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The speed, as name, value and a remark."""
    speed, shown = made["speed"], []
    step, padding = speed["step_time_s"], speed["padding"]
    where = f"{speed['ranks']} rank{'s' * (speed['ranks'] > 1)}, {speed['device']}"
    shown.append(("step", f"{step['value']:.4g} s", f"{step['low']:.4g} to {step['high']:.4g} s; {where}"))
    for name, key, remark in (
        ("samples/s", "samples_per_second", ""),
        ("tokens/s", "effective_tokens_per_second", ", without padding"),
    ):
        if speed[key] and speed[key]["value"]:
            value, low, high = (format_count(speed[key][end]) for end in ("value", "low", "high"))
            shown.append((name, value, f"{low} to {high}{remark}"))
    if made.get("recorded_tokens_per_second"):
        shown.append(("metrics.jsonl", format_count(made["recorded_tokens_per_second"]), "tokens/s of the run itself"))
    if speed["mfu"]:
        shown.append(("MFU", f"{speed['mfu']:.1%}", ""))
    if padding:
        found = f"of the tokens, {padding['distinct_shapes']} shapes in {padding['batches']} batches"
        shown.append(("padding", f"{padding['share']:.1%}", found))
    if speed["peak_memory_gib"]:
        shown.append(("peak memory", f"{speed['peak_memory_gib']:.3g} GiB", ""))
    return shown


def tables(made: dict[str, Any]) -> list[Table]:
    """All that the report lists below the causes; the first cell of a checked row is its state."""
    functions = [[f"{item['share']:.1%}", item["phase"], item["where"]] for item in made["functions"]]
    found = made["speed"]["padding"]
    padding = [[name, f"{share:.1%}"] for name, share in found["policies"].items()] if found and found["share"] else []
    ranks = [[f"rank {item['rank']} on {item['host']}", f"{item['own_step_s']:.4g} s"] for item in made["ranks"]]
    checks = [[check["state"], check["what"], check["found"], check["change"]] for check in made["checks"]]
    listed = [
        Table("Functions of the program", "", ["share of the time", "phase", "function"], functions),
        Table("Padding", "", ["policy, for the same rows", "padding"], padding),
        Table("Checked", "What to look at is advice: it wasn't measured.", ["", "what", "found", "change"], checks),
        Table("Ranks", "A step by itself, without waiting for others.", ["rank", "step"], ranks[1:] and ranks),
        Table("Notes", "", ["note"], [[note] for note in made.get("notes", [])]),
    ]
    listed = [table for table in listed if table.rows]
    if against := made.get("against"):
        rows = [[name, str(old), str(new)] for name, (old, new) in against["changed"].items()]
        listed.append(Table(f"Against {against['experiment']}", against["verdict"], ["setting", "there", "here"], rows))
    return listed


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
        lines += ["", title] if listed else []
        for number, cause in enumerate(listed, 1):
            share = cause["share"]
            interval = f"[{share['low']:.1%} to {share['high']:.1%}]"
            lines += [
                f"  {number}. {share['value']:>6.1%}  {interval}  {cause['title']}",
                f"      seen:   {cause['seen']}",
                f"      change: {cause['change']}",
                f"      gain:   {cause['known']}: {cause['gain']}",
            ]
    lines += [f"  {OVERLAP}"] if len(made["causes"]) > 1 else []
    for table in tables(made):
        lines += ["", table.title.upper(), *([f"  {table.about}"] if table.about else [])]
        lines += ["  " + "  ".join(filter(None, [f"{row[0]:<14}", *row[1:]])) for row in table.rows]
    return "\n".join(lines)
