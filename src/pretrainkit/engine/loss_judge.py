"""Which losses a run must not learn from: NaN, infinite, or far above those before."""

from __future__ import annotations

import math
from collections import deque

WINDOW_STEPS = 32
"""Steps whose mean loss a new one is compared with."""
MIN_STEPS = 8
"""Steps that must be known before a spike can be told; after every start they are seen anew."""


class LossJudge:
    """Remembers the losses of the last steps and says what is wrong with a new one."""

    def __init__(self, max_spike: float | None) -> None:
        """`max_spike`: largest loss as a multiple of the mean over the window; None: any finite loss is fine."""
        self._max_spike = max_spike
        self._losses: deque[float] = deque(maxlen=WINDOW_STEPS)

    def problem(self, loss: float) -> str:
        """What is wrong with a step's loss, or an empty text."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if self._max_spike is None or len(self._losses) < MIN_STEPS:
            return ""
        mean = sum(self._losses) / len(self._losses)
        if loss <= self._max_spike * mean:
            return ""
        return f"the loss {loss:.4f} is over {self._max_spike:g} x {mean:.4f}, the mean of {len(self._losses)} steps"

    def accept(self, loss: float) -> None:
        """Remember the loss of a step that was learnt from."""
        self._losses.append(loss)
