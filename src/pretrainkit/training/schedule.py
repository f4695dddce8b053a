"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

SCHEDULES = ("cosine", "linear", "constant")


def learning_rate(
    step: int, *, schedule: str, max_lr: float, min_lr: float, warmup_steps: int, decay_steps: int
) -> float:
    """The learning rate of optimizer step `step` (the first step is 0).

    Linear warm-up reaches `max_lr` at step `warmup_steps`; then it falls to `min_lr`, reached at step
    `decay_steps` and kept after it. It depends on nothing but its arguments, so a resumed run can't
    inherit a stale schedule from its checkpoint.
    """
    if step < warmup_steps:
        return max_lr * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return max_lr
    if step >= decay_steps:
        return min_lr
    progress = (step - warmup_steps) / (decay_steps - warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return min_lr + share * (max_lr - min_lr)
