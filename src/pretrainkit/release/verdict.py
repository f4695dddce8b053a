"""What the release gate finds: checks, and the verdict that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_LIMIT = 8  # names that a message lists


@dataclass(frozen=True)
class Check:
    """One question that the gate asks."""

    name: str
    passed: bool
    found: str
    """What was seen, for people."""


@dataclass
class Verdict:
    """All that the gate found."""

    source: str
    released: str
    checks: list[Check] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every file of the release."""
    skipped: list[str] = field(default_factory=list)
    """What was not checked, and why."""

    @property
    def passed(self) -> bool:
        """Whether every check passed, and there was one."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"passed": self.passed, **asdict(self)}


def check_of(name: str, problems: Sequence[str], fine: str) -> Check:
    """A check that passes when there is no problem."""
    if not problems:
        return Check(name, True, fine)
    more = f" and {len(problems) - _LIMIT} more" if len(problems) > _LIMIT else ""
    return Check(name, False, "; ".join(problems[:_LIMIT]) + more)
