"""The learning rate as a pure function of the run and the step."""

from __future__ import annotations

import math

from pretrainkit.config.schema import ResolvedRun

_DECAYS = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "1-sqrt": lambda progress: 1 - math.sqrt(progress),
}
"""What is left of the way down to min_lr, by the share of the decay that is done."""


def learning_rate(run: ResolvedRun, step: int) -> float:
    """The learning rate of optimizer step `step`; the first step is 0.

    Linear warm-up to lr, reached at step lr_warmup_steps; then by schedule, with d = lr_decay_steps:

    - cosine, linear: down to min_lr, reached at step d.
    - constant: lr.
    - wsd (warm-up, stable, decay; Hu et al. 2024, arXiv 2404.06395): lr up to step d - lr_cooldown_steps, then down to
      min_lr, reached at step d. The decay 1 - sqrt(progress) is that of Haegele et al. 2024, arXiv 2405.18392.
    - power (Shen et al. 2024, arXiv 2408.13359): min(lr, B a n^b) and not below min_lr, then the same decay. B is the
      global batch size in samples, n the tokens of this step and those before it, each step counted with B samples.
      Without an a it is the one with which the law has lr at the end of the warm-up: lr (steps / warm-up steps)^b.

    With lr_rewarm_step all of this starts again at that step, with a warm-up that begins at min_lr, where the finished
    run that continues has ended (Ibrahim et al. 2024, arXiv 2403.08763).

    A resumed run can't inherit a stale schedule from its checkpoint.
    """
    optimizer = run.config.optimizer
    first = optimizer.lr_rewarm_step or 0
    warmed_up, end = first + run.lr_warmup_steps, run.lr_decay_steps
    if step < first:
        return run.min_lr
    if step < warmed_up:
        lowest = run.min_lr if first else 0.0
        return lowest + (optimizer.lr - lowest) * (step - first + 1) / (run.lr_warmup_steps + 1)
    is_whole = optimizer.lr_schedule in _DECAYS
    decay_begin = warmed_up if is_whole else end - run.lr_cooldown_steps
    if optimizer.lr_schedule == "constant" or step < decay_begin:
        return _before_decay(run, step - first)
    if step >= end:
        return run.min_lr
    share = _DECAYS[optimizer.lr_schedule if is_whole else optimizer.lr_cooldown_style](
        (step - decay_begin) / (end - decay_begin)
    )
    return run.min_lr + share * (_before_decay(run, decay_begin - first) - run.min_lr)


def _before_decay(run: ResolvedRun, step: int) -> float:
    """The learning rate between warm-up and decay, `step` steps after the schedule has started."""
    optimizer = run.config.optimizer
    if optimizer.lr_schedule != "power":
        return optimizer.lr
    if optimizer.lr_power_a is None:
        rate = optimizer.lr * ((step + 1) / (run.lr_warmup_steps + 1)) ** optimizer.lr_power_b
    else:
        tokens = (step + 1) * run.tokens_per_step
        rate = run.config.training.global_batch_size * optimizer.lr_power_a * tokens**optimizer.lr_power_b
    return max(run.min_lr, min(optimizer.lr, rate))


def describe_schedule(run: ResolvedRun) -> str:
    """The schedule in words, such as 'lr 0.0003 -> 3e-05 cosine, warm-up 0, decay to step 15'."""
    optimizer = run.config.optimizer
    again = f" again from step {optimizer.lr_rewarm_step}" if optimizer.lr_rewarm_step else ""
    decay = f"decay to step {run.lr_decay_steps}"
    if optimizer.lr_schedule not in ("constant", *_DECAYS):
        decay = f"{optimizer.lr_cooldown_style} decay from step {run.lr_decay_steps - run.lr_cooldown_steps} to "
        decay += str(run.lr_decay_steps)
    return (
        f"lr {optimizer.lr:g} -> {run.min_lr:g} {optimizer.lr_schedule}{again}, warm-up {run.lr_warmup_steps}, {decay}"
    )
