"""What a data tool prints: its result, as JSON or as lines for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """The result of a command."""

    value: Any
    """Records for --json, printed at once."""
    lines: Iterable[str]
    exit_code: int = 0

    def print(self, *, as_json: bool) -> int:
        """Print it; gives the exit code."""
        if as_json:
            print(json.dumps(self.value, indent=2, ensure_ascii=False, default=str))
        else:
            for line in self.lines:
                print(line)
        return self.exit_code
