"""One change of a setting that is tried inside the running program, and the batches that go with it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pretrainkit.diagnosis.session import batches
from pretrainkit.diagnosis.session.streams import Replay

if TYPE_CHECKING:
    from pretrainkit.diagnosis.session.child import Session

WORTH_A_LOOK = 0.02
"""Share of the step that a phase must take for its changes to be tried."""


@dataclass(frozen=True)
class Switch:
    """A change: B windows are measured with it on, A windows with it off, over the same kept batches."""

    name: str
    on: Callable[[], None]
    off: Callable[[], None]
    seen: list[Any] | None = None
    """Batches to replay instead of the kept ones: the same samples arranged otherwise."""
    settle_steps: int = 1
    """Steps after switching on that aren't measured."""
    detail: str = ""
    """What exactly is changed, for the report."""


Built = Switch | str
"""A switch, or why it doesn't apply here."""


def nothing() -> None:
    """No change."""


class SetUp:
    """A switch and its batches, on for the length of a block."""

    def __init__(self, session: Session, switch: Switch | None, kept: list[Any]) -> None:
        self._session, self._switch, self._kept = session, switch, kept

    def __enter__(self) -> None:
        seen = self._switch.seen if self._switch and self._switch.seen else self._kept
        self._session.source = Replay(seen) if seen else None
        if self._switch:
            self._switch.on()

    def __exit__(self, *_: Any) -> None:
        if self._switch:
            self._switch.off()
        self._session.source = None


def work_of(seen: list[Any]) -> dict[str, float]:
    """Mean samples, tokens and real tokens of a micro batch of some batches."""
    facts = [batches.measure(batch) for batch in seen]
    return {
        name: math.fsum(fact[name] for fact in facts) / max(len(facts), 1)
        for name in ("samples", "tokens", "real_tokens")
    }


@contextlib.contextmanager
def ignoring_errors(notes: list[str], what: str):  # type: ignore[no-untyped-def]
    """Let a side measurement fail without ending the program."""
    try:
        yield
    except Exception as error:
        notes.append(f"{what}: {type(error).__name__}: {error}")
