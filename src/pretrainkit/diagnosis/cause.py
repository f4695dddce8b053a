"""One way in which time is lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pretrainkit.diagnosis.statistics import Interval


@dataclass(frozen=True)
class Cause:
    """One way in which time is lost, or could be gained."""

    name: str
    title: str
    share: Interval
    """Of the step time as it is."""
    why: str
    """What was seen."""
    change: str
    """What to do: a flag or a line."""
    gain: str
    """What was measured with the change made."""
    is_option: bool = False
    evidence: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All fields; the share with its interval."""
        return {
            "name": self.name,
            "title": self.title,
            "share": self.share.to_json(),
            "why": self.why,
            "change": self.change,
            "gain": self.gain,
            "evidence": self.evidence,
        }
