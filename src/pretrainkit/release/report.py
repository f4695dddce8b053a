"""The release gate's report, for people and for machines."""

from __future__ import annotations

from pathlib import Path

from pretrainkit.files import write_json, write_text
from pretrainkit.release.verdict import Verdict


def write_report(verdict: Verdict, prefix: Path) -> None:
    """Write `prefix`.json and `prefix`.md."""
    write_json(prefix.with_name(prefix.name + ".json"), verdict.as_dict())
    write_text(prefix.with_name(prefix.name + ".md"), as_markdown(verdict) + "\n")


def as_markdown(verdict: Verdict, *, hashes: bool = True) -> str:
    """The report as Markdown tables."""
    failed = [check for check in verdict.checks if not check.passed]
    result = "passed" if verdict.passed else f"REFUSED: {len(failed)} of {len(verdict.checks)} checks failed"
    lines = [
        f"# Release check: {result}",
        "",
        f"Released: {verdict.released}",
        f"Source: {verdict.source}",
        "",
        "| check | result | found |",
        "|---|---|---|",
    ]
    for check in verdict.checks:
        found = check.found.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {check.name} | {'ok' if check.passed else 'FAILED'} | {found} |")
    lines += ["", *(f"Not checked: {reason}" for reason in verdict.skipped)]
    if hashes:
        lines += ["| file | SHA-256 |", "|---|---|"]
        lines += [f"| {name} | {digest} |" for name, digest in verdict.hashes.items()]
    return "\n".join(lines).rstrip()
