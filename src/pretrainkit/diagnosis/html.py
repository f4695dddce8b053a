"""The report as one HTML page with its pictures drawn in it: no script, no file and no network is needed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import zip_longest
from typing import Any

from pretrainkit.diagnosis import pictures
from pretrainkit.diagnosis.checks import WARN
from pretrainkit.units import format_count

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --warn: #c2410c; --good: #15803d; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.name { color: #888; overflow-wrap: anywhere; }
.numbers { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.number { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .9rem; min-width: 8rem; }
.number b { display: block; font-size: 1.35rem; } .number small { color: #888; }
.cause { border-left: .3rem solid var(--warn); background: var(--soft); padding: .6rem 1rem; margin: .7rem 0; }
.option { border-color: #2563eb; } .cause h3 { margin: 0; font-size: 1rem; }
.cause p { margin: .25rem 0; overflow-wrap: anywhere; }
.change { font-family: ui-monospace, monospace; font-size: .9rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25rem .6rem .25rem 0;
 border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
th { font-weight: 600; }
.warn { color: var(--warn); } .fine { color: var(--good); }
svg { width: 100%; height: auto; } svg text { fill: currentColor; }
"""


def page(made: dict[str, Any]) -> str:
    """The whole page."""
    parts = [
        "<h1>Where the time goes</h1>",
        f'<p class="name">{escape(made["program"]["kind"])}: {escape(made["program"]["name"])}</p>',
        _numbers(made),
        "<h2>Causes</h2>",
        _causes(made["causes"], "cause")
        or f"<p>None over 2% of the step time; differences under {made['noise']:.1%} can't be told here.</p>",
    ]
    if made["options"]:
        parts += [
            "<h2>Options: faster, with other numbers, memory or batch</h2>",
            _causes(made["options"], "cause option"),
        ]
    if made["causes"] or made["options"]:
        parts += ["<h2>Shares</h2>", pictures.shares([*made["causes"], *made["options"]])]
    parts += ["<h2>A step</h2>", pictures.phases(made["phases"]), pictures.timeline(made["timeline"])]
    parts += [_functions(made)]
    padding = made["speed"]["padding"]
    if padding:
        parts += ["<h2>Lengths and padding</h2>", pictures.histogram(padding["lengths"]), _padding(padding)]
    parts += ["<h2>Checked</h2>", _checks(made)]
    parts += [_comparisons(made), _tables(made)]
    if made["notes"]:
        parts += ["<h2>Notes</h2>", "".join(f"<p>{escape(note)}</p>" for note in made["notes"])]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Where the time goes</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _numbers(made: dict[str, Any]) -> str:
    speed = made["speed"]
    step = speed["step_time_s"]
    shown = [("step", f"{step['value']:.4g} s", f"{step['low']:.4g} to {step['high']:.4g}")]
    for title, key in (
        ("tokens/s without padding", "effective_tokens_per_second"),
        ("samples/s", "samples_per_second"),
    ):
        if speed[key]:
            rate = speed[key]
            shown.append(
                (title, format_count(rate["value"]), f"{format_count(rate['low'])} to {format_count(rate['high'])}")
            )
    if speed["mfu"]:
        shown.append(("MFU", f"{speed['mfu']['value']:.1%}", ""))
    if speed["padding"]:
        shown.append(("padding", f"{speed['padding']['share']:.1%}", f"{speed['padding']['distinct_shapes']} shapes"))
    if speed["peak_memory_gib"]:
        shown.append(("peak memory", f"{speed['peak_memory_gib']:.3g} GiB", speed["device"]))
    cells = (
        f'<div class="number">{escape(title)}<b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for title, value, note in shown
    )
    return f'<div class="numbers">{"".join(cells)}</div>'


def _causes(causes: list[dict[str, Any]], kind: str) -> str:
    return "".join(
        f'<div class="{kind}"><h3>{number}. {share["value"]:.1%} '
        f"[{share['low']:.1%} to {share['high']:.1%}] {escape(cause['title'])}</h3>"
        f"<p>{escape(cause['why'])}</p>"
        f'<p class="change">{escape(cause["change"])}</p><p>{escape(cause["gain"])}</p></div>'
        for number, cause in enumerate(causes, 1)
        for share in [cause["share"]]
    )


def table(head: list[str], rows: list[list[str]], states: Sequence[str] = ()) -> str:
    """An HTML table; its cells are plain text, the first one of a row may have a state for its colour."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    coloured = (
        line.replace("<td>", f'<td class="{state}">', 1) if state else line
        for line, state in zip_longest(lines, states, fillvalue="")
    )
    return f"<table><tr>{top}</tr>{''.join(f'<tr>{line}</tr>' for line in coloured)}</table>"


def _functions(made: dict[str, Any]) -> str:
    rows = [[f"{item['share']:.1%}", item["phase"], item["where"]] for item in made["functions"]]
    return table(["share", "phase", "the program's function that was seen there"], rows) if rows else ""


def _padding(padding: dict[str, Any]) -> str:
    rows = [[name, f"{share:.1%}"] for name, share in padding["policies"].items()]
    return table(["policy, for the same rows", "padding"], rows)


def _checks(made: dict[str, Any]) -> str:
    checked, fine, uncertain = made["checks"], made["fine"], made["uncertain"]
    rows = [[check["what"], check["found"], check["change"]] for check in checked]
    rows += [[item["what"], item["found"], ""] for item in fine]
    rows += [[item["what"], item["found"], "uncertain"] for item in uncertain]
    states = ["warn" if check["state"] == WARN else "fine" for check in checked] + ["fine"] * len(fine)
    return table(["what", "found", "change"], rows, states)


def _comparisons(made: dict[str, Any]) -> str:
    parts = []
    baseline, against, agreed = made.get("baseline"), made.get("against"), made.get("metrics_jsonl")
    if baseline:
        parts.append(
            f"<h2>Baseline</h2><p>{baseline['ratio']:.2f} of {baseline['tokens_per_second']:,} tokens/s: "
            f"{escape(baseline['name'])}, {escape(baseline['layers'])} layers, {escape(baseline['versions'])}</p>"
        )
    if against:
        rows = [[name, str(old), str(new)] for name, (old, new) in against["changed"].items()]
        parts.append(
            f"<h2>Against {escape(against['experiment'])}</h2><p>{escape(against['verdict'])}</p>"
            + table(["setting", "there", "here"], rows)
        )
    if agreed and agreed["difference"] is not None:
        parts.append(
            f"<p>metrics.jsonl has {agreed['recorded_step_time_s']:.4g} s for the same steps, "
            f"{agreed['difference']:+.1%} from the step time above.</p>"
        )
    return "".join(parts)


def _tables(made: dict[str, Any]) -> str:
    parts = []
    if made["speed"]["ranks"] > 1:
        rows = [[str(item["rank"]), item["host"], f"{item['own_step_s'] or 0:.4g} s"] for item in made["ranks"]]
        parts += ["<h2>Ranks</h2>", table(["rank", "host", "a step by itself"], rows)]
    if made["loader_alone"]:
        rows = [
            [item["settings"], f"{item['batches_per_second']:.4g}", f"{item['first_batch_s']:.3g} s"]
            for item in made["loader_alone"]
        ]
        parts += ["<h2>The loader alone</h2>", table(["settings", "batches/s", "until the first"], rows)]
    if made["attention_alone"]:
        rows = [
            [item["kernel"], f"{item['milliseconds']:.3g} ms" if "milliseconds" in item else item["why_not"]]
            for item in made["attention_alone"]
        ]
        parts += [
            "<h2>Attention alone, forward and backward on the loop's shapes</h2>",
            table(["kernel", "time"], rows),
        ]
    profile = made["profile"]
    if profile:
        total = sum(item["seconds"] for item in profile["top"]) or 1.0
        rows = [[item["name"], str(item["calls"]), f"{item['seconds'] / total:.1%}"] for item in profile["top"]]
        parts += ["<h2>Operators (torch.profiler)</h2>", table(["operator", "calls", "share of these"], rows)]
    return "".join(parts)
