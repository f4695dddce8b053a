"""The curves of experiments that are compared: by tokens, and the training loss by hours as well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrainkit.run.history import History, losses_by_source

MAX_POINTS = 800
"""Of a curve: a page of ten experiments stays below some megabytes. More points are averaged."""


class Curve(NamedTuple):
    """What is drawn of an experiment in a panel."""

    name: str
    """Of the experiment."""
    x: Sequence[float]
    y: Sequence[float]
    is_mark: bool = False
    """Drawn as single marks: restarts."""


Panel = tuple[str, list[Curve]]
"""A title, and the curves below it."""


@dataclass(frozen=True)
class Course:
    """An experiment with what is drawn of it."""

    name: str
    history: History

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """The steps with a record [N]."""
        return np.array([record["step"] for record in self.history.steps], dtype=np.int64)

    def values(self, *names: str) -> NDArray[np.float64]:
        """A field of the steps' records, or a field of a field, [N]; NaN where there is none."""

        def value(record: object) -> float:
            for name in names:
                record = record.get(name) if isinstance(record, dict) else None
            return float(record) if isinstance(record, (int, float)) else math.nan

        return np.array([value(record) for record in self.history.steps], dtype=np.float64)

    @cached_property
    def tokens(self) -> NDArray[np.float64]:
        """Tokens trained on after each of the steps [N]."""
        return self.values("tokens")

    @cached_property
    def hours(self) -> NDArray[np.float64]:
        """Hours of training after each of the steps [N]: without repeated steps, evaluations and waits for saves."""
        begin = self.history.attempts[0].start_step if self.history.attempts else 0
        return np.cumsum(self.values("step_time_s") * np.diff(self.steps, prepend=begin)) / 3600

    def by_tokens(self, steps: Sequence[float], values: Sequence[float | None]) -> Curve:
        """A curve of what was measured after some steps, such as those of evaluations."""
        y = [math.nan if value is None else value for value in values]
        if not len(self.steps):
            return Curve(self.name, [math.nan] * len(y), y)
        # A branch begins with the tokens of its parent.
        begin = self.history.attempts[0].start_step if self.history.attempts else 0
        first = self.tokens[0] * begin / self.steps[0]
        return Curve(self.name, list(np.interp(steps, [begin, *self.steps], [first, *self.tokens])), y)


def by_field(courses: Sequence[Course], *field: str) -> list[Curve]:
    """A field of the steps' records by tokens."""
    return [_fewer(course.name, course.tokens, course.values(*field)) for course in courses]


def losses(courses: Sequence[Course]) -> list[Panel]:
    """Training losses by tokens and by hours, with a mark at each restart."""
    panels: list[Panel] = []
    for title in ("by tokens", "by hours"):
        curves: list[Curve] = []
        for course in courses:
            x, y = course.tokens if title == "by tokens" else course.hours, course.values("loss")
            curves.append(_fewer(course.name, x, y))
            known = ~np.isnan(y)
            starts = [attempt.start_step for attempt in course.history.attempts[1:]]
            if known.any():
                marked_x, marked_y = (np.interp(starts, course.steps[known], values[known]) for values in (x, y))
                curves.append(Curve(course.name, list(marked_x), list(marked_y), is_mark=True))
        panels.append((title, curves))
    return panels


def held_out(courses: Sequence[Course]) -> list[Panel]:
    """Losses of the whole of each evaluation."""

    def curves(field: str) -> list[Curve]:
        found = []
        for course in courses:
            records = [record for record in course.history.evaluations if field in record]
            found.append(course.by_tokens([each["step"] for each in records], [each[field] for each in records]))
        return found

    return [("nats per token", curves("val_loss")), ("bits per byte", curves("val_bits_per_byte"))]


def by_source(courses: Sequence[Course]) -> list[Panel]:
    """Held-out losses of each set, label and part."""
    panels: dict[str, list[Curve]] = {}
    for course in courses:
        for group, name, values in losses_by_source(course.history.evaluations):
            steps, found = zip(*values, strict=True)
            panels.setdefault(f"{group} {name}", []).append(course.by_tokens(steps, found))
    return list(panels.items())


def by_label(courses: Sequence[Course]) -> list[Panel]:
    """Training losses of each label; most steps may have no token of a rare one."""
    records = (record for course in courses for record in course.history.steps)
    labels = {label for record in records for label in record.get("loss_by_label", ())}
    panels: list[Panel] = []
    for label in sorted(labels):
        curves = []
        for course in courses:
            values = course.values("loss_by_label", label)
            known = ~np.isnan(values)
            curves.append(_fewer(course.name, course.tokens[known], values[known]))
        panels.append((label, curves))
    return panels


def tasks(courses: Sequence[Course]) -> list[Panel]:
    """Results of evaluation tasks (event `evaluation`)."""
    panels: dict[str, list[Curve]] = {}
    for course in courses:
        found: dict[str, list[tuple[int, float]]] = {}
        for record in course.history.results:
            for task, metrics in record.get("tasks", {}).items():
                for metric, value in metrics.items():
                    if isinstance(value, (int, float)):
                        found.setdefault(f"{task}: {metric}", []).append((record["step"], value))
        for title, points in found.items():
            steps, values = zip(*points, strict=True)
            panels.setdefault(title, []).append(course.by_tokens(steps, values))
    return list(panels.items())


def _fewer(name: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> Curve:
    """A curve of at most MAX_POINTS, each the mean of as many neighbours."""
    size = -(-len(x) // MAX_POINTS)
    if size > 1:
        edges = np.arange(0, len(x), size)
        counts = np.add.reduceat((~np.isnan(y)).astype(np.int64), edges)
        y = np.where(counts, np.add.reduceat(np.nan_to_num(y), edges) / np.maximum(counts, 1), np.nan)
        x = np.maximum.reduceat(x, edges)
    return Curve(name, list(x), list(y))
