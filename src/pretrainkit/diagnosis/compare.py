"""Two experiments: how much longer one takes, and how much of that is more data and how much is slower training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pretrainkit.config.run_file import read_run
from pretrainkit.errors import RequestError
from pretrainkit.run.folder import RunFolder

AGREEING = 0.1
"""Difference of two speeds that is no difference."""


def recorded_rate(folder: Path) -> float | None:
    """Tokens/s that a run has recorded in metrics.jsonl; None when it has recorded no step."""
    from pretrainkit.run.history import read_history

    if not RunFolder(folder).metrics.is_file():
        return None
    rate: float | None = read_history(folder).summary["tokens_per_second"]
    return rate


def against_experiment(folder: Path, other_folder: Path) -> dict[str, Any]:
    """The tokens and tokens/s of two runs, and the settings that differ.

    Raises RequestError when one has no run.json or no records.
    """
    from pretrainkit.run.identity import changes

    runs = [read_run(RunFolder(path).run_file) for path in (folder, other_folder)]
    rates = []
    for path in (folder, other_folder):
        rate = recorded_rate(path)
        if rate is None:
            raise RequestError("no step was recorded", where=str(RunFolder(path).metrics))
        rates.append(rate)
    tokens = [run.max_steps * run.tokens_per_step for run in runs]
    return {
        "experiment": str(other_folder),
        "tokens": tokens,
        "tokens_per_second": rates,
        "verdict": verdict(tokens[0] / tokens[1], rates[1] / rates[0]),
        "changed": {name: list(values) for name, values in changes(runs[1], runs[0]).items()},
    }


def verdict(more_tokens: float, slower: float) -> str:
    """In words: the time of two runs differs by so much data, and by so much speed."""
    data = "as many tokens" if abs(more_tokens - 1) < 1e-3 else f"{more_tokens:.3g} times the tokens"
    if abs(slower - 1) < AGREEING:
        return f"{data} at the same speed: {more_tokens * slower:.3g} times as long, all of it the amount of data"
    kind = "slower" if slower > 1 else "faster"
    factor = max(slower, 1 / slower)
    return f"{data}, and {factor:.3g} times {kind} per token: {more_tokens * slower:.3g} times as long in all"
