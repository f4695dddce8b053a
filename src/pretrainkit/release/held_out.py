"""The run that a released checkpoint is of, and its held-out losses, from the records of its experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrainkit.config.run_file import read_run
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.run.folder import RunFolder, step_of
from pretrainkit.run.history import losses_of
from pretrainkit.run.json_lines import read_records


def held_out_of(source: Path) -> dict[str, Any]:
    """The records of the `first` evaluation of a run and of the `last` up to a checkpoint; empty where there are none.

    Their fields are those of `pretrainkit.run.held_out`.
    """
    found = _checkpoint(source)
    if found is None:
        return {}
    folder, step = found
    records = [each for each in read_records(folder.metrics) if each.keys() >= {"step", "val_loss"}]
    by_step = {each["step"]: each for each in records if each["step"] <= step}  # a later record of a step counts
    return {"first": by_step[min(by_step)], "last": by_step[max(by_step)]} if by_step else {}


def run_of(source: Path) -> ResolvedRun | None:
    """The run that saved a checkpoint; None where its experiment isn't there."""
    found = _checkpoint(source)
    return read_run(found[0].run_file) if found and found[0].run_file.is_file() else None


def _checkpoint(source: Path) -> tuple[RunFolder, int] | None:
    """The experiment of a checkpoint that a run saved, and its step."""
    path = source.resolve()
    steps = ((each, step_of(each)) for each in (path, path.parent))
    return next(((RunFolder(each.parents[1]), step) for each, step in steps if step is not None), None)


def held_out_rows(found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """What was evaluated with its first and last loss in nats per token, and its last bits per byte."""
    first, last = found["first"], found["last"]

    before, bits = losses_of(first), losses_of(last, "bits_per_byte")
    rows = [("all", first["val_loss"], last["val_loss"], last.get("val_bits_per_byte"))]
    rows += [(name, before.get(name), loss, bits.get(name)) for name, loss in losses_of(last).items()]
    shown = [[name, *("" if value is None else f"{value:.4f}" for value in values)] for name, *values in rows]
    return [(name, was, now, bits_now) for name, was, now, bits_now in shown]
