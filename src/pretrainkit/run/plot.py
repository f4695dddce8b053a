"""The picture of an experiment over all its attempts: losses, held-out losses by source, learning rate and speed."""

from __future__ import annotations

import math
from pathlib import Path

from pretrainkit import files
from pretrainkit.run.history import History, losses_by_source

MAX_SOURCES = 20
"""Lines of one picture that colours and line styles tell apart."""


def plot_history(history: History, path: Path) -> None:
    """Write a PNG of a history. A repeated step is drawn once, as it was last recorded."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    sources = losses_by_source(history.evaluations)[:MAX_SOURCES]
    heights = (3, 2, 1, 1) if sources else (3, 1, 1)
    figure = Figure(figsize=(10, 8 + 3 * bool(sources)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    loss_axes, *source_axes, rate_axes, speed_axes = figure.subplots(
        len(heights), 1, sharex=True, height_ratios=heights
    )
    steps = [record["step"] for record in history.steps]
    losses = [math.nan if record["loss"] is None else record["loss"] for record in history.steps]
    # Markers keep a few points visible.
    marker = "." if len(steps) < 50 else ""
    loss_axes.plot(steps, losses, marker=marker, linewidth=1, label="training loss")
    if history.validation:
        held_out_steps, held_out = zip(*history.validation, strict=True)
        values = [math.nan if value is None else value for value in held_out]
        loss_axes.plot(held_out_steps, values, "o-", color="tab:red", markersize=4, label="held-out loss")
    for axes in source_axes:
        for number, (_, name, points) in enumerate(sources):
            at, values_of = zip(*points, strict=True)
            style = ".-" if number < 10 else ".--"
            axes.plot(at, [math.nan if value is None else value for value in values_of], style, linewidth=1, label=name)
        axes.set_ylabel("held-out loss")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=2)
    rate_axes.plot(steps, [record["learning_rate"] for record in history.steps], marker=marker, color="tab:green")
    rates = [record.get("tokens_per_second", math.nan) for record in history.steps]
    speed_axes.plot(steps, rates, marker=marker, color="tab:purple")
    for axes, name in ((loss_axes, "loss"), (rate_axes, "learning rate"), (speed_axes, "tokens/s")):
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
        for attempt in history.attempts[1:]:
            axes.axvline(attempt.start_step, color="gray", linestyle="--", linewidth=0.8)
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    speed_axes.set_ylim(bottom=0)
    starts: dict[int, list[int]] = {}
    for number, attempt in enumerate(history.attempts, 1):
        starts.setdefault(attempt.start_step, []).append(number)
    for step, numbers in starts.items():  # several at one step share a label
        loss_axes.annotate(
            f"start {numbers[0]}" + ("" if len(numbers) == 1 else f"-{numbers[-1]}"),
            (step, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -10),
            textcoords="offset points",
            fontsize=8,
            color="gray",
        )
    if history.attempts:  # an attempt starts one step before its first record
        loss_axes.set_xlim(left=min(attempt.start_step for attempt in history.attempts))
    for number, step in enumerate(history.summary["bad_steps"]):
        label = "" if number else "bad loss, no update"
        loss_axes.axvline(step, color="tab:orange", linestyle=":", linewidth=1.5, label=label)
    speed_axes.set_xlabel("step")
    speed_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    loss_axes.set_title(Path(history.summary["experiment"]).name)
    loss_axes.legend()
    with files.atomic_file(path) as temporary:
        canvas.print_png(str(temporary))
