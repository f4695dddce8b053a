"""Where the time of a step goes: a clock that charges every moment to the innermost phase."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DATA, FORWARD, BACKWARD, OPTIMIZER = "data", "forward", "backward", "optimizer"
COMMUNICATION, CHECKPOINT, OTHER = "communication", "checkpoint", "other"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, COMMUNICATION, CHECKPOINT, OTHER)


class PhaseClock:
    """Charges the main thread's time to phases; what is in none of them is OTHER.

    On a GPU the times are those of the host, which only queues the work, unless `synchronize` is set: then the
    device is waited for at each border, so that each phase has its own time and none overlap.
    """

    def __init__(self) -> None:
        self.synchronize: Callable[[], None] | None = None
        self._thread = threading.get_ident()
        self._stack: list[str] = []
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._since_s = time.perf_counter()

    def charge_this_thread(self) -> None:
        """From now on charge the calling thread."""
        self._thread = threading.get_ident()

    @property
    def current(self) -> str:
        """The innermost phase."""
        return self._stack[-1] if self._stack else OTHER

    def enter(self, phase: str) -> bool:
        """Begin a phase; False on threads that are not charged, whose `leave` must not be called."""
        if threading.get_ident() != self._thread:
            return False
        self._charge()
        self._stack.append(phase)
        return True

    def leave(self) -> None:
        """End the innermost phase."""
        self._charge()
        if self._stack:
            self._stack.pop()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase as a block."""
        entered = self.enter(name)
        try:
            yield
        finally:
            if entered:
                self.leave()

    def end_step(self) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        self._charge()
        spent = dict(self._spent_s)
        self._spent_s.clear()
        return spent

    def _charge(self) -> None:
        if self.synchronize:
            self.synchronize()
        now_s = time.perf_counter()
        self._spent_s[self.current] += now_s - self._since_s
        self._since_s = now_s
