"""The report as one HTML page: no script, no file and no network is needed, and a phone is wide enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from pretrainkit.diagnosis.checks import WARN
from pretrainkit.diagnosis.report import OVERLAP, numbers

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --warn: #c2410c; --good: #15803d; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 60rem; padding: 0 1rem;
 overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; } .soft { color: #888; }
.summary { font-size: 1.1rem; border-left: .3rem solid var(--warn); padding-left: .8rem; }
.numbers { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1rem 0; }
.number { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .8rem; }
.number b { display: block; font-size: 1.3rem; } .number small { color: #888; }
.cause { background: var(--soft); padding: .6rem 1rem; margin: .7rem 0; border-radius: .3rem; }
.cause h3 { margin: 0 0 .3rem; font-size: 1rem; } .option .bar i { background: #2563eb; }
dl { display: grid; grid-template-columns: 5.5rem 1fr; gap: .15rem .6rem; margin: .4rem 0 0; } dd { margin: 0; }
dt { font-weight: 600; } .change { font-family: ui-monospace, monospace; font-size: .9rem; }
.bar { position: relative; height: .9rem; background: var(--soft); border-radius: .2rem; }
.bar i { position: absolute; inset: 0 auto 0 0; background: var(--warn); border-radius: .2rem; }
.bar u { position: absolute; top: .4rem; height: .15rem; background: currentColor; }
.strip { display: flex; height: 1.6rem; border-radius: .3rem; overflow: hidden; background: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; margin: .4rem 0; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .2rem; margin-right: .3rem; }
.bins { display: flex; align-items: flex-end; height: 8rem; gap: 1px; border-bottom: 1px solid var(--line); }
.bins i { flex: 1; background: #2563eb; } .ends { display: flex; justify-content: space-between; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .25rem .6rem .25rem 0;

 border-bottom: 1px solid var(--line); vertical-align: top; }
.warn { color: var(--warn); } .fine { color: var(--good); }
@media (max-width: 36rem) { dl { grid-template-columns: 1fr; } dt { margin-top: .3rem; }
 tr, td { display: block; } th { display: none; } td { border: 0; padding: 0; }
 tr { border-bottom: 1px solid var(--line); padding: .4rem 0; } }
"""
COLOURS = {
    "data": "#dc2626",
    "forward": "#2563eb",
    "backward": "#7c3aed",
    "optimizer": "#059669",
    "communication": "#d97706",
    "checkpoint": "#64748b",
    "logging": "#db2777",
    "other": "#94a3b8",
}
BINS = 40
LABELS = {"warn": "look at", "fine": "fine", "noted": "noted", "uncertain": "uncertain", "none": "doesn't apply"}


def page(made: dict[str, Any]) -> str:
    """The whole page."""
    parts = [
        "<h1>Where the time goes</h1>",
        f'<p class="soft">{escape(made["program"]["kind"])}: {escape(made["program"]["name"])}</p>',
        f'<p class="summary">{escape(made["summary"])}</p>',
        _numbers(made),
        "<h2>A step as it is</h2>",
        _phases(made),
        _section("Causes", _causes(made["causes"], "cause"), made["causes"]),
        f'<p class="soft">{OVERLAP}</p>' if len(made["causes"]) > 1 else "",
        _section("Options: faster, with other numbers or another batch", _causes(made["options"], "cause option")),
        _section("Lengths and padding", _padding(made["speed"]["padding"])),
        "<h2>Checked</h2>",
        _checks(made),
        _comparisons(made),
        _tables(made),
        _section("Notes", "".join(f"<p>{escape(note)}</p>" for note in made["notes"])),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Where the time goes</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _section(title: str, body: str, shown: object = True) -> str:
    return f"<h2>{escape(title)}</h2>{body}" if body and shown else ""


def _numbers(made: dict[str, Any]) -> str:
    cells = (
        f'<div class="number">{escape(name)}<b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for name, value, note in numbers(made)
    )
    return f'<div class="numbers">{"".join(cells)}</div>'


def _causes(causes: list[dict[str, Any]], kind: str) -> str:
    return "".join(
        f'<div class="{kind}"><h3>{number}. {escape(cause["title"])}: {share["value"]:.1%}</h3>'
        f'<div class="bar"><i style="width:{share["value"]:.1%}"></i>'
        f'<u style="left:{share["low"]:.1%};width:{share["high"] - share["low"]:.1%}"></u></div>'
        f"<dl><dt>Seen</dt><dd>{escape(cause['seen'])} (phase: {escape(cause['phase'])})</dd>"
        f'<dt>Change</dt><dd class="change">{escape(cause["change"])}</dd>'
        f"<dt>Gain</dt><dd>{escape(cause['known'])}: {escape(cause['gain'])}</dd></dl></div>"
        for number, cause in enumerate(causes, 1)
        for share in [cause["share"]]
    )


def _strip(parts: Iterable[tuple[str, float, str]]) -> str:
    """Phases side by side: name, share, words on hovering."""
    cells = (
        f'<i style="width:{share:.3%};background:{COLOURS[name]}" title="{escape(title)}"></i>'
        for name, share, title in parts
    )
    return f'<div class="strip">{"".join(cells)}</div>'


def _phases(made: dict[str, Any]) -> str:
    spent = made["phases"]
    legend = "".join(
        f'<span><i style="background:{COLOURS[name]}"></i>{name} {share:.1%}</span>' for name, share in spent.items()
    )
    parts = [_strip((name, share, f"{name} {share:.1%}") for name, share in spent.items())]
    parts.append(f'<div class="legend">{legend}</div>')
    for item in made["ranks"] if made["speed"]["ranks"] > 1 else []:
        strip = _strip((name, share, f"{name} {share:.1%}") for name, share in item["phases"].items())
        parts.append(f'<p class="soft">rank {item["rank"]}</p>{strip}')
    rows = [[f"{item['share']:.1%}", item["phase"], item["where"]] for item in made["functions"]]
    parts.append(table(["share of the time", "phase", "the program's function"], rows) if rows else "")
    return "".join(parts)


def table(head: list[str], rows: list[list[str]], states: Sequence[str] = ()) -> str:
    """An HTML table; its cells are plain text, the first one of a row may have a state for its colour."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = []
    for number, row in enumerate(rows):
        first = f' class="{states[number]}"' if states else ""
        cells = (f"<td{first if not column else ''}>{escape(cell)}</td>" for column, cell in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><tr>{top}</tr>{''.join(lines)}</table>"


def _padding(padding: dict[str, Any] | None) -> str:
    """How many rows have how many real tokens, and what other policies would make of them."""
    if not padding:
        return ""
    lengths = padding["lengths"]
    width = max(1, math.ceil((max(lengths) + 1) / BINS))
    counts = [0] * (max(lengths) // width + 1)
    for length in lengths:
        counts[length // width] += 1
    bins = "".join(
        f'<i style="height:{count / max(counts):.1%}" title="{index * width} to {(index + 1) * width - 1} tokens: '
        f'{count} rows"></i>'
        for index, count in enumerate(counts)
    )
    rows = [[name, f"{share:.1%}"] for name, share in padding["policies"].items()]
    ends = f'<div class="ends soft"><span>0</span><span>tokens of a row</span><span>{max(lengths)}</span></div>'
    return f'<div class="bins">{bins}</div>{ends}' + table(["policy, for the same rows", "padding"], rows)


def _checks(made: dict[str, Any]) -> str:
    items = [(check["state"], check["what"], check["found"], check["change"]) for check in made["checks"]]
    for state, name in (("uncertain", "uncertain"), ("fine", "fine"), ("none", "not_applicable")):
        items += [(state, item["what"], item["found"], "") for item in made[name]]
    items.sort(key=lambda item: list(LABELS).index(item[0]) if item[0] != WARN else -1)
    rows = [[LABELS[state], what, found, change] for state, what, found, change in items]
    colours = {"warn": "warn", "fine": "fine"}
    return table(["", "what", "found", "change"], rows, [colours.get(item[0], "soft") for item in items])


def _comparisons(made: dict[str, Any]) -> str:
    against = made.get("against")
    if not against:
        return ""
    rows = [[name, str(old), str(new)] for name, (old, new) in against["changed"].items()]
    body = f"<p>{escape(against['verdict'])}</p>" + table(["setting", "there", "here"], rows)
    return _section(f"Against {against['experiment']}", body)


def _tables(made: dict[str, Any]) -> str:
    parts = []
    if made["speed"]["ranks"] > 1:
        rows = [[f"rank {item['rank']}", item["host"], f"{item['own_step_s'] or 0:.4g} s"] for item in made["ranks"]]
        parts.append(_section("Ranks", table(["rank", "host", "a step by itself"], rows)))
    profile = made["profile"]
    if profile:
        total = sum(item["seconds"] for item in profile["top"]) or 1.0
        rows = [[item["name"], f"{item['calls']} calls", f"{item['seconds'] / total:.1%}"] for item in profile["top"]]
        parts.append(_section("Operators (torch.profiler)", table(["operator", "calls", "share of these"], rows)))
    return "".join(parts)
