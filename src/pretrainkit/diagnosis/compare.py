"""A run against another experiment with more or less data, and against its own records."""

from __future__ import annotations

from pathlib import Path
from statistics import median_high
from typing import Any

from pretrainkit.config.run_file import read_run
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import RequestError
from pretrainkit.run.folder import RunFolder

AGREEING = 0.1
"""Difference of two speeds that is no difference."""


def against_experiment(run: ResolvedRun, folder: Path, other_folder: Path) -> dict[str, Any]:
    """Two runs: how much longer one takes, and how much of that is more data and how much is slower training.

    Raises RequestError when the other has no run.json or no records.
    """
    from pretrainkit.run.history import read_history
    from pretrainkit.run.identity import changes

    other = read_run(RunFolder(other_folder).run_file)
    rates = [read_history(path).summary["tokens_per_second"] for path in (folder, other_folder)]
    if None in rates:
        raise RequestError(
            "no step was recorded", where=str(RunFolder((folder, other_folder)[rates.index(None)]).metrics)
        )
    own_rate, other_rate = (float(rate or 0.0) for rate in rates)
    own_tokens, other_tokens = (float(one.max_steps * one.tokens_per_step) for one in (run, other))

    def pair(this: float, of_other: float) -> dict[str, float]:
        return {"this": this, "other": of_other, "ratio": this / of_other}

    return {
        "experiment": str(other_folder),
        "tokens": pair(own_tokens, other_tokens),
        "dataset_tokens": {"this": run.dataset.num_tokens, "other": other.dataset.num_tokens},
        "dataset_documents": {"this": run.dataset.num_documents, "other": other.dataset.num_documents},
        "tokens_per_second": pair(own_rate, other_rate),
        "total_time_s": pair(own_tokens / own_rate, other_tokens / other_rate),
        "verdict": verdict(own_tokens / other_tokens, other_rate / own_rate),
        "changed": {name: list(values) for name, values in changes(other, run).items()},
    }


def verdict(more_tokens: float, slower: float) -> str:
    """In words: the time of two runs differs by so much data, and by so much speed."""
    data = "as many tokens" if abs(more_tokens - 1) < 1e-3 else f"{more_tokens:.3g} times the tokens"
    if abs(slower - 1) < AGREEING:
        return f"{data} at the same speed: {more_tokens * slower:.3g} times as long, all of it the amount of data"
    kind = "slower" if slower > 1 else "faster"
    factor = max(slower, 1 / slower)
    return f"{data}, and {factor:.3g} times {kind} per token: {more_tokens * slower:.3g} times as long in all"


def agreement(experiment: Path | None, scratch: Path, windows: list[list[int]], step_s: float) -> dict[str, Any]:
    """The step time of our windows, and what the run itself wrote to metrics.jsonl for the same steps, and before.

    Args:
        experiment: folder of the run that is diagnosed.
        scratch: folder of its copy that was measured.
        windows: first step and number of steps of each window of the run as it is.
        step_s: seconds of a step by our windows.
    """
    from pretrainkit.run.history import read_history

    history = read_history(scratch)
    by_step = {record["step"]: record["tokens_per_second"] for record in history.steps}
    run = read_run(RunFolder(scratch).run_file)
    tokens = run.tokens_per_step
    recorded = [
        sum(tokens / by_step[step] for step in range(first, first + count)) / count
        for first, count in windows
        if all(step in by_step for step in range(first, first + count))
    ]
    middle = median_high(recorded) if recorded else None
    before = None
    if experiment is not None and RunFolder(experiment).metrics.is_file():
        before = read_history(experiment).summary["tokens_per_second"]
    return {
        "windows": len(recorded),
        "recorded_step_time_s": middle,
        "measured_step_time_s": step_s,
        "difference": None if middle is None else step_s / middle - 1,
        "tokens_per_second_of_the_run": before,
        "tokens_per_second_now": tokens / step_s,
    }
