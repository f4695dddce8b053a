"""The tables of bench_preprocess.py, from everything that was measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

Key = tuple[str, str, int, str]
"""Vocabulary, input, cores, what."""
QUIET = 0.4
"""Cores that others may use during a run; one that was disturbed more tells nothing."""


def report(results: Path) -> str:
    """Markdown."""
    runs: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    disturbed = 0
    for line in results.read_text().splitlines():
        run = json.loads(line)
        if run["others_cpu_s"] > QUIET * run["wall_s"]:
            disturbed += 1
        else:
            runs[run["vocabulary"], run["input"], run["cores"], run["what"]].append(run)
    seconds = {key: statistics.median(run["wall_s"] for run in found) for key, found in runs.items()}
    lines = [
        f"{_processor()}, Python {platform.python_version()}; tokenizers {version('tokenizers')},"
        f" fastokens {version('fastokens')}, transformers {version('transformers')},"
        f" megatron-core {version('megatron-core')}.",
        "",
        "| vocabulary | text | cores | what | runs | seconds, whole command | CPU s | MB/s | peak MB | ratio |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for key in sorted(runs):
        found = runs[key]
        walls = sorted(run["wall_s"] for run in found)
        base = seconds.get((*key[:3], "Megatron's way"))
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {key[3]} | {len(found)} |"
            f" {seconds[key]:.2f} ({walls[0]:.2f} to {walls[-1]:.2f}) |"
            f" {statistics.median(run['cpu_s'] for run in found):.1f} | {found[0]['megabytes'] / seconds[key]:.1f} |"
            f" {max(run['peak_mb'] for run in found):.0f} |" + (f" {base / seconds[key]:.1f} |" if base else " |")
        )
    lines += ["", *_equality(runs), *_rates(seconds, runs), *_safety(runs)]
    lines.append(f"- Left out: {disturbed} runs during which others used more than {QUIET} cores.")
    return "\n".join(lines)


def _equality(runs: dict[Key, list[dict[str, Any]]]) -> list[str]:
    digests = defaultdict(set)
    for (vocabulary, name, _, what), found in runs.items():
        if what != "ours, a run a core":  # its special tokens are plain text
            digests[vocabulary, name] |= {run["digest"] for run in found}
    equal = all(len(values) == 1 for values in digests.values())
    return [f"- The same bytes from every command on every number of cores: {'yes' if equal else 'NO'}."]


def _rates(seconds: dict[Key, float], runs: dict[Key, list[dict[str, Any]]]) -> list[str]:
    """Rates without the start of the commands: what 270 MB more take."""
    lines = []
    rates: dict[tuple[str, str, int], float] = {}
    for vocabulary, name, cores, what in sorted(seconds):
        short = seconds.get((vocabulary, "mix30", cores, what))
        if name == "mix300" and short:
            more = runs[vocabulary, "mix300", cores, what][0]["megabytes"]
            more -= runs[vocabulary, "mix30", cores, what][0]["megabytes"]
            rate = rates[vocabulary, what, cores] = more / (seconds[vocabulary, name, cores, what] - short)
            lines.append(f"- {vocabulary}, {what}, {cores} cores, without the start: {rate:.1f} MB/s.")
    for vocabulary, what, cores in sorted(rates):
        one = rates.get((vocabulary, what, 1))
        if cores > 1 and one:
            whole = seconds[vocabulary, "mix300", 1, what] / seconds[vocabulary, "mix300", cores, what]
            gain = rates[vocabulary, what, cores] / one
            lines.append(
                f"- {vocabulary}, {what}, from 1 to {cores} cores: {gain:.2f} times the rate without the start,"
                f" {whole:.2f} times as fast with it."
            )
    for vocabulary, name, cores, what in sorted(seconds):
        one = seconds.get((vocabulary, name, 1, "ours"))
        if what == "ours, a run a core" and one:
            gain = cores * one / seconds[vocabulary, name, cores, what]
            lines.append(
                f"- {vocabulary}, {name}: {cores} runs at once on a core each do {gain:.2f} times the work of one:"
                " the machine's own gain."
            )
    return lines


def _safety(runs: dict[Key, list[dict[str, Any]]]) -> list[str]:
    """Pairs of neighbouring runs, with and without: medians of their quotients."""
    lines = []
    for (vocabulary, name, cores, what), stripped in sorted(runs.items()):
        if what == "ours, not safe to kill":
            safe = runs[vocabulary, name, cores, "ours"]
            for unit in ("wall_s", "cpu_s"):
                cost = statistics.median(r[unit] for r in safe) / statistics.median(r[unit] for r in stripped) - 1
                lines.append(f"- Safety, {vocabulary}, {name}, {cores} cores: {100 * cost:+.1f}% {unit}.")
    return lines


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()}, {os.cpu_count()} cores"
    return platform.machine()
