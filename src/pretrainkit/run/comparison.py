"""Experiments side by side as one HTML page: no script, no file and no network is needed to read it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from pretrainkit import files
from pretrainkit.errors import RequestError
from pretrainkit.records import leaves
from pretrainkit.run import curves
from pretrainkit.run.curves import Course, Curve, Panel
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.history import History
from pretrainkit.units import format_count

MAX_PANELS = 24
"""Sources, tasks and so on that are drawn in a section."""
STYLE = """
* { box-sizing: border-box; } body { font: 16px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 72rem;
 padding: 0 1rem; background: #fff; color: #222; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; } .soft { color: #666; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; } svg { width: 100%; height: auto; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 0 .5rem; }
td, th { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #ddd; white-space: nowrap; }
"""
_HEAD = ("experiment", "steps", "tokens", "hours", "loss", "held-out", "bits/byte", "tokens/s", "MFU", "restarts")


def names_of(experiments: Sequence[Path]) -> list[str]:
    """A name for each: that of its folder, or its path where that is another's, too. Raises RequestError for one given
    twice.
    """
    paths = [path.resolve() for path in experiments]
    if twice := sorted({str(path) for path in paths if paths.count(path) > 1}):
        raise RequestError(f"named twice: {', '.join(twice)}", action="name it once")
    names = [path.name for path in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]


def write_comparison(histories: Mapping[str, History], path: Path) -> None:
    """Write the page of some experiments, by name."""
    files.write_text(path, comparison_page([Course(name, history) for name, history in histories.items()]))


def comparison_page(courses: Sequence[Course]) -> str:
    """The whole page."""
    router = ("largest_load", "smallest_load", "balance", "aux_loss")
    speed = {"learning rate": "learning_rate", "gradient norm": "grad_norm", "tokens/s": "tokens_per_second"}
    pictures = {
        "Training loss": curves.losses(courses),
        "Held-out loss": curves.held_out(courses),
        "Held-out loss by source": curves.by_source(courses),
        "Training loss by label": curves.by_label(courses),
        "Learning rate and speed": [(title, curves.by_field(courses, field)) for title, field in speed.items()],
        "Router": [(name.replace("_", " "), curves.by_field(courses, "router", name)) for name in router],
        "Evaluations": curves.tasks(courses),
    }
    names = [course.name for course in courses]
    parts = [
        "<h1>Experiments</h1>",
        _table(_HEAD, map(_summary, courses)),
        _section("Options that differ", _options(courses)),
        *(_section(title, _pictures(title, panels, names)) for title, panels in pictures.items()),
        _section("Starts", _starts(courses)),
    ]
    body = "\n".join(part for part in parts if part)
    title = escape(", ".join(names))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>{body}" if body else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>' if lines else ""


def _summary(course: Course) -> list[str]:
    """A row of the first table."""
    found = course.history.summary
    bits = (found["last_evaluation"] or {}).get("val_bits_per_byte")
    hours = course.hours[-1] if len(course.hours) else None
    tokens, rate, mfu = found["tokens"], found["tokens_per_second"], found["mfu"]
    return [
        course.name,
        f"{found['steps_done']} of {found['max_steps'] or '?'}",
        "" if tokens is None else format_count(tokens),
        "" if hours is None else f"{hours:.3g}",
        *("" if value is None else f"{value:.4f}" for value in (found["loss"], found["val_loss"], bits)),
        "" if rate is None else format_count(rate),
        "" if mfu is None else f"{mfu:.1%}",
        str(found["restarts"]),
    ]


def _options(courses: Sequence[Course]) -> str:
    """Options of run.json in which the experiments differ."""
    found = [dict(leaves(_config(course))) for course in courses]
    rows = []
    for name in dict.fromkeys(name for each in found for name in each if name != "experiment"):
        values = ["" if (value := each.get(name)) is None else str(value) for each in found]
        if len(set(values)) > 1:
            rows.append([name, *values])
    return _table(["option", *(course.name for course in courses)], rows)


def _config(course: Course) -> dict[str, Any]:
    described = files.read_object(RunFolder(Path(course.history.summary["experiment"])).run_file)
    config: dict[str, Any] = described.get("config", {})
    return config


def _starts(courses: Sequence[Course]) -> str:
    rows = []
    for course in courses:
        attempts, logs = course.history.attempts, course.history.summary["logs"]
        for number, attempt in enumerate(attempts):
            outcome = logs[number] if len(logs) == len(attempts) else {}
            code = outcome.get("exit_code")
            ended = f"{'' if code is None else f'exit code {code} '}{outcome.get('reason', '')}"
            steps = f"{attempt.start_step} to {attempt.last_step}"
            rows.append([course.name, attempt.time, attempt.mode or "", steps, str(attempt.world_size or ""), ended])
    return _table(["experiment", "started", "mode", "steps", "ranks", "ended"], rows)


def _pictures(salt: str, panels: Sequence[Panel], names: Sequence[str]) -> str:
    """An SVG for each panel that has something to draw; `names` of all experiments give each its colour.

    `salt` makes the ids of a section differ from others'.
    """
    shown = [panel for panel in panels if any(curve.y and not np.isnan(curve.y).all() for curve in panel[1])]
    figures = (_figure(f"{salt} {title}", title, found, names) for title, found in shown[:MAX_PANELS])
    body = "".join(f"<div>{figure}</div>" for figure in figures)
    more = len(shown) - MAX_PANELS
    note = f'<p class="soft">{more} more are not drawn</p>' if more > 0 else ""
    return f'<div class="panels">{body}</div>{note}' if body else ""


def _figure(salt: str, title: str, found: Sequence[Curve], names: Sequence[str]) -> str:
    """An SVG of curves."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for curve in found:
        number = names.index(curve.name)
        colour, style = f"C{number % 10}", ("-", "--", ":", "-.")[number // 10 % 4]
        if curve.is_mark:
            axes.plot(curve.x, curve.y, "|", markersize=28, markeredgewidth=1.2, color="black")
        else:
            marker = "." if len(curve.x) < 50 else ""
            axes.plot(curve.x, curve.y, style, marker=marker, linewidth=1.2, color=colour, label=curve.name)
    axes.set_title(title, fontsize=10)
    if title == "by hours":
        axes.set_xlabel("hours", fontsize=9)
    else:
        axes.set_xlabel("tokens", fontsize=9)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    text, nothing = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # the browser has more fonts
        FigureCanvasSVG(figure).print_svg(text, metadata=nothing)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
