"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pretrainkit.config.schema import ResolvedRun

SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to max_lr, reached at step `warmup_steps`; then down to min_lr, reached at step `decay_steps`.

    It depends only on its fields and the step, so a resumed run can't inherit a stale schedule from its checkpoint.
    """

    name: str
    """One of SCHEDULES: the shape of the decay; constant has none."""
    max_lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int

    def learning_rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`; the first step is 0."""
        if step < self.warmup_steps:
            return self.max_lr * (step + 1) / (self.warmup_steps + 1)
        if self.name == "constant":
            return self.max_lr
        if step >= self.decay_steps:
            return self.min_lr
        progress = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        share = 0.5 * (1 + math.cos(math.pi * progress)) if self.name == "cosine" else 1 - progress
        return self.min_lr + share * (self.max_lr - self.min_lr)


def schedule_of(run: ResolvedRun) -> Schedule:
    """The schedule that a resolved run asks for."""
    settings = run.config.optimizer
    return Schedule(settings.lr_schedule, settings.lr, run.min_lr, run.lr_warmup_steps, run.lr_decay_steps)
