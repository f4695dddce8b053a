"""The release gate's report: checks with what was found, for people (Markdown) and for machines (JSON)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pretrainkit.errors import RequestError
from pretrainkit.files import read_json, write_json, write_text
from pretrainkit.records import decode
from pretrainkit.release.held_out import held_out_rows

_LISTED_PROBLEMS = 8


@dataclass(frozen=True)
class Check:
    """One question that the gate asks."""

    name: str
    passed: bool
    found: str
    """What was observed, for people."""

    @staticmethod
    def of(name: str, problems: Sequence[str], fine: str) -> Check:
        """A check that passes when there is no problem; `fine` is what it found then."""
        if not problems:
            return Check(name, True, fine)
        more = f" and {len(problems) - _LISTED_PROBLEMS} more" if len(problems) > _LISTED_PROBLEMS else ""
        return Check(name, False, "; ".join(problems[:_LISTED_PROBLEMS]) + more)


def collect(name: str, checks: Iterable[Check]) -> list[Check]:
    """The checks that a generator yields. Any exception in it is a doubt: a check `name` that failed."""
    done: list[Check] = []
    try:
        done.extend(checks)
    except Exception as error:
        done.append(Check(name, False, f"{type(error).__name__}: {error}"))
    return done


@dataclass
class ReleaseReport:
    """All that the gate found."""

    source: str
    released: str
    sources: list[str] = field(default_factory=list)
    """Absolute paths of what the release was compared with."""
    checks: list[Check] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every file of the release."""
    skipped: list[str] = field(default_factory=list)
    """What was not checked, and why."""
    notes: list[str] = field(default_factory=list)
    """What a user of the release needs to know."""
    held_out: dict[str, Any] = field(default_factory=dict)
    """Records of the `first` evaluation of the run and of the `last` up to the checkpoint (`release.held_out`)."""

    @property
    def passed(self) -> bool:
        """Whether there was a check, and every one passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {"passed": self.passed, **asdict(self)}

    def as_markdown(self, *, hashes: bool = True) -> str:
        """The report as Markdown tables."""
        failed = sum(not check.passed for check in self.checks)
        result = "passed" if self.passed else f"REFUSED: {failed} of {len(self.checks)} checks failed"
        lines = [f"# Release check: {result}", "", f"Released: {self.released}", f"Source: {self.source}", ""]
        lines += ["| check | result | found |", "|---|---|---|"]
        for check in self.checks:
            lines.append(f"| {check.name} | {'ok' if check.passed else 'FAILED'} | {_cell(check.found)} |")
        lines += [
            "",
            *(f"Noted: {note}" for note in self.notes),
            *(f"Not checked: {reason}" for reason in self.skipped),
        ]
        if self.held_out:
            first, last = self.held_out["first"]["step"], self.held_out["last"]["step"]
            lines += ["", f"| held-out loss | step {first} | step {last} | bits per byte |", "|---|--:|--:|--:|"]
            lines += [f"| {' | '.join(map(_cell, row))} |" for row in held_out_rows(self.held_out)]
            lines.append("")
        if hashes:
            lines += ["| file | SHA-256 |", "|---|---|"]
            lines += [f"| {name} | {digest} |" for name, digest in self.hashes.items()]
        return "\n".join(lines).rstrip()

    def write(self, prefix: Path) -> None:
        """Write `prefix`.json and `prefix`.md."""
        write_json(prefix.with_name(prefix.name + ".json"), self.as_dict())
        write_text(prefix.with_name(prefix.name + ".md"), self.as_markdown() + "\n")


def report_prefix(released: Path) -> Path:
    """Where the report of a release is, unless it is asked for elsewhere: RELEASED.verified.json and .md."""
    return released.with_name(released.name + ".verified")


def read_report(path: Path) -> ReleaseReport:
    """The report in a JSON file. Raises RequestError when there is none that this version reads."""
    try:
        fields = read_json(path)
        fields["checks"] = [decode(Check, each) for each in fields["checks"]]
        del fields["passed"]
        return ReleaseReport(**fields)
    except FileNotFoundError:
        raise RequestError("no report of the release gate", where=str(path)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RequestError(f"not a report of the release gate: {error}", where=str(path)) from error


def _cell(text: str) -> str:
    """A cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
