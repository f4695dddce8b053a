"""The report as one HTML page: no script, no file and no network is needed, and a phone is wide enough."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from pretrainkit.diagnosis.checks import FINE, LOOK_AT
from pretrainkit.diagnosis.report import OVERLAP, numbers, tables

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
    "other": "#94a3b8",
}


def page(made: dict[str, Any]) -> str:
    """The whole page."""
    cells = (
        f'<div class="number">{escape(name)}<b>{escape(value)}</b><small>{escape(note)}</small></div>'
        for name, value, note in numbers(made)
    )
    parts = [
        "<h1>Where the time goes</h1>",
        f'<p class="soft">{escape(made["program"]["kind"])}: {escape(made["program"]["name"])}</p>',
        f'<p class="summary">{escape(made["summary"])}</p>',
        f'<div class="numbers">{"".join(cells)}</div>',
        "<h2>A step as it is</h2>",
        _phases(made["phases"]),
        *(_causes("Causes", "cause", made["causes"])),
        f'<p class="soft">{OVERLAP}</p>' if len(made["causes"]) > 1 else "",
        *(_causes("Options: faster, with other numbers or another batch", "cause option", made["options"])),
    ]
    for item in tables(made):
        about = f'<p class="soft">{escape(item.about)}</p>' if item.about else ""
        parts.append(f"<h2>{escape(item.title)}</h2>{about}{table(item.head, item.rows)}")
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Where the time goes</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _phases(spent: dict[str, float]) -> str:
    """Phases side by side, as wide as their share, and what each colour is."""
    strip = "".join(f'<i style="width:{share:.3%};background:{COLOURS[name]}"></i>' for name, share in spent.items())
    legend = "".join(
        f'<span><i style="background:{COLOURS[name]}"></i>{name} {share:.1%}</span>' for name, share in spent.items()
    )
    return f'<div class="strip">{strip}</div><div class="legend">{legend}</div>'


def _causes(title: str, kind: str, causes: list[dict[str, Any]]) -> list[str]:
    made = [f"<h2>{escape(title)}</h2>"] if causes else []
    for number, cause in enumerate(causes, 1):
        share = cause["share"]
        made.append(
            f'<div class="{kind}"><h3>{number}. {escape(cause["title"])}: {share["value"]:.1%}</h3>'
            f'<div class="bar"><i style="width:{share["value"]:.1%}"></i>'
            f'<u style="left:{share["low"]:.1%};width:{share["high"] - share["low"]:.1%}"></u></div>'
            f"<dl><dt>Seen</dt><dd>{escape(cause['seen'])} (phase: {escape(cause['phase'])})</dd>"
            f'<dt>Change</dt><dd class="change">{escape(cause["change"])}</dd>'
            f"<dt>Gain</dt><dd>{escape(cause['known'])}: {escape(cause['gain'])}</dd></dl></div>"
        )
    return made


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of plain text; the state of a check in a first cell has its colour."""
    colours = {LOOK_AT: ' class="warn"', FINE: ' class="fine"'}
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    for first, *others in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        lines.append(f"<td{colours.get(first, '')}>{escape(first)}</td>{cells}")
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
