"""The learning rate as a pure function of the run and the step."""

from __future__ import annotations

import math

from pretrainkit.config.schema import ResolvedRun


def learning_rate(run: ResolvedRun, step: int) -> float:
    """The learning rate of optimizer step `step`; the first step is 0.

    Linear warm-up to lr, reached at step lr_warmup_steps; then, unless the schedule is constant, down to min_lr,
    reached at step lr_decay_steps. A resumed run can't inherit a stale schedule from its checkpoint.
    """
    schedule, max_lr = run.config.optimizer.lr_schedule, run.config.optimizer.lr
    if step < run.lr_warmup_steps:
        return max_lr * (step + 1) / (run.lr_warmup_steps + 1)
    if schedule == "constant":
        return max_lr
    if step >= run.lr_decay_steps:
        return run.min_lr
    progress = (step - run.lr_warmup_steps) / (run.lr_decay_steps - run.lr_warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return run.min_lr + share * (max_lr - run.min_lr)
