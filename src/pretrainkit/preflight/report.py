"""What a preflight finds: checks, and the report of a node that they make."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: str
    """ok, warning, failed or skipped."""
    found: str
    action: str = ""
    """What to do about it."""

    @property
    def is_failed(self) -> bool:
        """Whether no rank should be started."""
        return self.status == FAILED

    def describe(self) -> str:
        """A line of the table, and one more with what to do."""
        line = f"  {self.name:<12}{self.status:<9}{self.found}"
        return f"{line}\n{'':<23}what to do: {self.action}" if self.action else line


@dataclass(frozen=True)
class NodeReport:
    """All checks of one node."""

    host: str
    checks: tuple[Check, ...]

    @property
    def problems(self) -> list[str]:
        """Why no rank should be started on this node; empty when the node is good."""
        return [f"{check.name}: {check.found}" for check in self.checks if check.is_failed]

    @property
    def is_good(self) -> bool:
        """Whether ranks may be started."""
        return not self.problems

    def describe(self) -> str:
        """The table, one line a check, without a newline at the end."""
        lines = [f"node {self.host}: {'good' if self.is_good else 'BAD'}"]
        return "\n".join([*lines, *(check.describe() for check in self.checks)])

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"host": self.host, "good": self.is_good, "checks": [asdict(check) for check in self.checks]}


P = ParamSpec("P")
Finding = tuple[str, str] | tuple[str, str, str]
"""Status, what was found, and where it is needed what to do about it."""


def check(name: str) -> Callable[[Callable[P, Finding]], Callable[P, Check]]:
    """Make a check of a function; if it raises, the node has failed, since the ranks would break too."""

    def decorate(look: Callable[P, Finding]) -> Callable[P, Check]:
        @functools.wraps(look)
        def run(*args: P.args, **kwargs: P.kwargs) -> Check:
            try:
                return Check(name, *look(*args, **kwargs))
            except Exception as error:
                return Check(name, FAILED, f"the check itself failed: {type(error).__name__}: {error}")

        return run

    return decorate
