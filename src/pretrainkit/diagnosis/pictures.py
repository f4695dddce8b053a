"""The report's pictures as SVG: shares of causes, phases of a step, the timeline of ranks, lengths of rows."""

from __future__ import annotations

import math
from html import escape
from typing import Any

WIDTH = 900
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


def _svg(height: float, parts: list[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" '
        f'font-family="system-ui, sans-serif" font-size="13">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _bar(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.1):.2f}" height="{height}" fill="{colour}">{inner}</rect>'
    )


def shares(causes: list[dict[str, Any]]) -> str:
    """A bar for each cause, with its interval."""
    left, scale, parts = 390, WIDTH - 390 - 70, []
    for number, cause in enumerate(causes):
        y, share = 8 + number * 28, cause["share"]
        low, high = (left + scale * min(max(share[end], 0.0), 1.0) for end in ("low", "high"))
        parts += [
            _text(left - 10, y + 14, cause["title"][:58], "end"),
            _bar(left, y, scale * max(share["value"], 0.0), 18, "#c2410c"),
            f'<path d="M{low:.1f} {y + 9} H{high:.1f} M{low:.1f} {y + 4} v10 M{high:.1f} {y + 4} v10" '
            'stroke="currentColor" stroke-width="1.5"/>',
            _text(WIDTH - 4, y + 14, f"{share['value']:.1%}", "end"),
        ]
    return _svg(16 + 28 * len(causes), parts, "share of the step time by cause")


def phases(spent: dict[str, float]) -> str:
    """One bar cut into the phases of a step, with a legend."""
    x, parts, legend = 0.0, [], 0.0
    for name, share in spent.items():
        parts.append(_bar(x, 4, share * WIDTH, 26, COLOURS[name], f"{name} {share:.1%}"))
        x += share * WIDTH
        words = f"{name} {share:.1%}"
        parts += [_bar(legend, 42, 11, 11, COLOURS[name]), _text(legend + 16, 52, words)]
        legend += 34 + 7.2 * len(words)
    return _svg(60, parts, "phases of a step")


def timeline(ranks: list[dict[str, Any]]) -> str:
    """The last steps of each rank, phase by phase."""
    ranks = [item for item in ranks if item["events"]]
    if not ranks:
        return ""
    # The clocks of different processes begin anywhere: each rank's line begins with its own first event.
    span_s = max(item["events"][-1][2] - item["events"][0][1] for item in ranks) or 1.0
    left, parts = 60, []
    scale = (WIDTH - left) / span_s
    for number, item in enumerate(ranks):
        y, begin_s = 6 + number * 30, item["events"][0][1]
        parts.append(_text(0, y + 15, f"rank {item['rank']}"))
        for phase, since_s, until_s in item["events"]:
            x = left + (since_s - begin_s) * scale
            parts.append(
                _bar(x, y, (until_s - since_s) * scale, 20, COLOURS[phase], f"{phase} {until_s - since_s:.4g} s")
            )
    height = 14 + 30 * len(ranks)
    parts.append(_text(WIDTH, height + 10, f"{span_s:.3g} s", "end"))
    return _svg(height + 16, parts, "timeline of the last steps")


def histogram(lengths: list[int], bins: int = 40) -> str:
    """How many rows have how many real tokens."""
    longest = max(lengths)
    width = max(1, math.ceil((longest + 1) / bins))
    counts = [0] * (longest // width + 1)
    for length in lengths:
        counts[length // width] += 1
    step, highest = WIDTH / len(counts), max(counts)
    parts = [
        _bar(
            index * step + 1,
            130 - 120 * count / highest,
            step - 2,
            max(round(120 * count / highest, 1), 0.1),
            "#2563eb",
            f"{index * width} to {(index + 1) * width - 1} tokens: {count} rows",
        )
        for index, count in enumerate(counts)
        if count
    ]
    parts += [
        _text(0, 148, "0"),
        _text(WIDTH, 148, f"{longest} tokens", "end"),
        _text(WIDTH / 2, 148, "length of a row", "middle"),
    ]
    return _svg(154, parts, "lengths of rows")
