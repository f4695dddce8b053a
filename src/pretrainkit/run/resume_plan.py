"""What a start of a run does: what it loads, and at which step and sample it continues. From files alone.

`pretrain.py --plan` prints it, every rank follows it, and the first rank records it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pretrainkit.config.batch_size import parse_rampup, samples_after
from pretrainkit.config.run_file import write_run
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import CheckpointError, PretrainkitError, RequestError
from pretrainkit.logs import get_logger
from pretrainkit.run import attempts, checkpoints
from pretrainkit.run.branch import parent_checkpoint
from pretrainkit.run.checkpoints import START_OVER, Checkpoint
from pretrainkit.run.folder import COMMIT_MARK, RunFolder, checkpoint_name
from pretrainkit.run.lr_schedule import learning_rate
from pretrainkit.run.retention import apply_retention, remove_leftovers
from pretrainkit.run.skipped_samples import NOTHING_SKIPPED, SkippedSamples, read_skipped
from pretrainkit.run.trackers import check_trackers, wandb_run_id

RANDOM, WEIGHTS, CONTINUE = "random", "weights", "continue"
"""Start modes: random weights; initial weights at step 0; everything from the run's own checkpoint."""
MODES = {RANDOM: "from random weights", WEIGHTS: "from trained weights", CONTINUE: "continuing"}
"""The same for people."""

_LAYOUTS = {
    "distributed": "optimizer.distributed true",
    "bf16": "optimizer.distributed false and precision bf16",
    "fp32": "optimizer.distributed false and precision fp32",
}
"""Settings that lead to each `optimizer_layout`."""

log = get_logger(__name__)


@dataclass(frozen=True)
class StartPlan:
    """The beginning of one attempt."""

    mode: str
    """RANDOM, WEIGHTS or CONTINUE."""
    checkpoint: str | None
    """Folder whose weights are loaded."""
    step: int
    """Optimizer steps done."""
    max_steps: int
    consumed_samples: int
    """Training samples used so far."""
    optimizer_state: str
    """zero: a new optimizer; restored: from the checkpoint; reset: the checkpoint's moments are dropped."""
    epoch: int | None
    """Completed passes over the dataset; None for a blend, whose parts end at different times."""
    sample: int
    """Next sample, counted from 0 within the epoch, or from the start of training for a blend."""
    learning_rate: float | None
    """Learning rate of the next step; None when all steps are done."""
    idle_restarts: int
    """Restarts in a row, up to now, without a new step."""
    wandb_run: str | None
    """Id of the W&B run that it continues; None: no W&B, or a new run."""
    branch: str | None = None
    """EXPERIMENT:STEP where the start is from the checkpoint of another experiment; else None."""
    skipped: SkippedSamples = NOTHING_SKIPPED
    """Samples that rollbacks leave out; `consumed_samples` doesn't count them."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Names of newer checkpoints whose bytes are not those that were saved, and what is wrong in each."""

    def last_sample(self, run: ResolvedRun) -> int:
        """Training samples used when all steps are done; earlier steps may have had another batch size."""
        return samples_after(run.config.training, max(0, self.max_steps - self.step), self.consumed_samples)

    @property
    def is_first(self) -> bool:
        """Whether the experiment has not trained a step that was saved."""
        return self.mode != CONTINUE or self.branch is not None

    @property
    def is_done(self) -> bool:
        """Whether all steps are done and saved."""
        return self.step >= self.max_steps

    @property
    def progress(self) -> str:
        """The steps that are done, such as '12 of 20 done'."""
        of_more = f", more than --max_steps {self.max_steps}"
        return f"{self.step} done{of_more}" if self.step > self.max_steps else f"{self.step} of {self.max_steps} done"

    def describe(self) -> str:
        """The plan as aligned lines 'what  value'."""
        loads = {RANDOM: "random weights", WEIGHTS: f"the weights of {self.checkpoint}"}.get(self.mode, self.checkpoint)
        moments = {"zero": "new", "restored": "restored", "reset": "reset: the checkpoint's moments are dropped"}
        where = f"sample {self.sample}" + ("" if self.epoch is None else f" of epoch {self.epoch + 1}")
        rate = "none left" if self.learning_rate is None else f"{self.learning_rate:.6g}"
        lines = {
            "start": f"branching from {self.branch}" if self.branch else MODES[self.mode],
            "loads": loads,
            "step": self.progress,
            "data": f"{self.consumed_samples} samples used, next is {where}",
            "optimizer": moments[self.optimizer_state],
            "next lr": rate,
            "restarts": f"{self.idle_restarts} in a row without a new step",
            **({"skipped": f"{self.skipped.count} samples"} if self.skipped.count else {}),
            **({"W&B run": self.wandb_run} if self.wandb_run else {}),
        }
        return "\n".join(f"{name:<10} {value}" for name, value in lines.items())


def plan_start(run: ResolvedRun, damaged: Mapping[str, str] = MappingProxyType({})) -> StartPlan:
    """The plan of the next start of `run`, which passes over `damaged` checkpoints (`StartPlan.damaged`).

    Raises:
        CheckpointError: no checkpoint of those there is complete, or it lacks what must be restored.
        RequestError: the run can't continue with this batch size, kind of optimizer or start of the schedule.
    """
    folder = RunFolder.of(run)
    checkpoint: str | None
    newest = checkpoints.newest_complete(folder.checkpoints, damaged)
    if newest is None:
        _refuse_lost_run(folder)
        newest = parent_checkpoint(run.branch, damaged) if run.branch else None
    if newest:
        _check_batch(run, newest)
        step, consumed_samples = newest.step, newest.consumed_samples
        mode, checkpoint, optimizer_state = CONTINUE, str(newest.path), _optimizer_state(run, newest)
    else:
        step = consumed_samples = 0
        checkpoint, optimizer_state = run.initial_weights.checkpoint if run.initial_weights else None, "zero"
        mode = WEIGHTS if checkpoint else RANDOM
    _check_rewarming(run, step)
    skipped = read_skipped(run)
    next_sample = skipped.place(consumed_samples)
    epoch, sample = (None, next_sample) if run.dataset.weights else divmod(next_sample, run.samples_per_epoch)
    return StartPlan(
        mode=mode,
        checkpoint=checkpoint,
        step=step,
        max_steps=run.max_steps,
        consumed_samples=consumed_samples,
        optimizer_state=optimizer_state,
        epoch=epoch,
        sample=sample,
        learning_rate=learning_rate(run, step) if step < run.max_steps else None,
        idle_restarts=attempts.restarts_without_progress(attempts.read_attempts(folder)),
        wandb_run=wandb_run_id(run),
        branch=f"{run.branch.experiment}:{step}" if run.branch and step == run.branch.step else None,
        skipped=skipped,
        damaged=dict(damaged),
    )


def check_start(run: ResolvedRun) -> str:
    """The mode of the next start; raises what its first rank would raise. For the process that starts the ranks."""
    check_trackers(run)
    plan, folder = plan_start(run), RunFolder.of(run)
    if plan.mode != CONTINUE and not folder.metrics.exists() and folder.attempt_folders():
        # Attempts that failed before their first record leave this; so does a run whose files were lost.
        log.warning("logs of attempts, but no checkpoint and no metrics.jsonl: starting from the beginning")
    check_crash_loop(run, plan)
    return plan.mode


def prepare(run: ResolvedRun, plan: StartPlan) -> None:
    """What the first rank does before a start: stop a crash loop, quarantine incomplete checkpoints, and remove expired
    ones, whose disk space the first save may need.

    Raises PretrainkitError when the last restarts reached no new step.
    """
    folder = RunFolder.of(run)
    check_crash_loop(run, plan)
    checkpoints.quarantine_incomplete(folder.checkpoints, plan.damaged)
    remove_leftovers(folder.checkpoints)
    apply_retention(run)
    if run.start_mode != plan.mode:  # a requeued job restarts its ranks without pretrain.py
        write_run(folder.run_file, replace(run, start_mode=plan.mode))
    for line in plan.describe().splitlines():
        log.info("%s", line)


def check_crash_loop(run: ResolvedRun, plan: StartPlan) -> None:
    """Raise PretrainkitError, with the last good checkpoint, after `restart_limit` restarts without a new step."""
    folder, limit = RunFolder.of(run), run.config.training.restart_limit
    if not limit or plan.idle_restarts < limit:
        return
    furthest = max(attempt.last_step for attempt in attempts.read_attempts(folder))
    raise PretrainkitError(
        f"{plan.idle_restarts} restarts in a row ended without a new step; the furthest was step {furthest}. "
        f"Last good checkpoint: {plan.checkpoint if plan.mode == CONTINUE else 'none'}",
        needed=f"fewer than {limit} such restarts (--restart_limit)",
        action=f"read the newest logs in {folder.logs}, fix the cause, and rerun once with --restart_limit 0",
        where=str(folder.path),
    )


def _refuse_lost_run(folder: RunFolder) -> None:
    """Refuse to start over where a checkpoint was saved once and is missing, or where no record says that none was."""
    if attempts.has_saved(folder):
        step = attempts.last_saved_step(folder)
        raise CheckpointError(
            f"no checkpoint is here, but {attempts.records_of_attempts(folder).name} has a record of one"
            + ("; the record is torn" if step is None else f", saved at step {step}"),
            needed="a checkpoint" if step is None else f"checkpoints/{checkpoint_name(step)}, or an older one",
            action=f"restore one from a backup; {START_OVER}",
            where=str(folder.path),
        )
    if checkpoints.checkpoint_folders(folder.checkpoints) and not attempts.records_of_attempts(folder).exists():
        raise CheckpointError(
            f"a checkpoint without {COMMIT_MARK}, and no metrics.jsonl or attempts.jsonl to say if it was the first",
            needed="those records, which exist before the first save begins, or a complete checkpoint",
            action=f"restore them from a backup; {START_OVER}",
            where=str(folder.path),
        )


def _check_batch(run: ResolvedRun, newest: Checkpoint) -> None:
    """Refuse another batch size without --allow_batch_change, and an epoch that can't be counted in steps."""
    training = run.config.training
    size, saved_size = training.global_batch_size, newest.global_batch_size
    advice = "revert the change, or add --allow_batch_change: steps and used samples continue to count, and the "
    advice += "learning rate still follows the steps"
    if saved_size not in (None, size) and not training.allow_batch_change:
        raise RequestError(
            f"the checkpoint of step {newest.step} was trained with {saved_size} samples a step, now {size}",
            needed=f"{saved_size}, to continue as before",
            action=advice,
            where="--global_batch_size",
        )
    rampups = newest.rampup_batch_size, training.rampup_batch_size
    longest = max((parse_rampup(rampup)[2] for rampup in rampups if rampup), default=0)
    if rampups[0] != rampups[1] and newest.consumed_samples < longest and not training.allow_batch_change:
        raise RequestError(
            f"another batch size warm-up: {rampups[0]} before, now {rampups[1]}",
            needed="the same until it is over, to continue as before",
            action=advice,
            where="--rampup_batch_size",
        )
    if training.max_steps is None and newest.consumed_samples != samples_after(training, newest.step):
        steps = (run.samples_per_epoch - newest.consumed_samples % run.samples_per_epoch) // size
        raise RequestError(
            f"one epoch can't be counted in steps: {newest.consumed_samples} samples were used in {newest.step} steps, "
            f"and a step has {size} now",
            needed="the number of steps",
            action=f"set it; the rest of this epoch is {steps} steps more, up to step {newest.step + steps}",
            where="--max_steps",
        )


def _check_rewarming(run: ResolvedRun, step: int) -> None:
    """Refuse a schedule that starts again at a step that is not done: what it is until then isn't known any more."""
    rewarm_step = run.config.optimizer.lr_rewarm_step
    if rewarm_step and step < rewarm_step:
        raise RequestError(
            f"the schedule starts again at step {rewarm_step}, and {step} steps are done",
            needed="a step that the run, or the checkpoint it starts from, has reached",
            action=f"set it to {step} or, to finish the first schedule, leave it out"
            if step
            else "leave it out: a run from the weights of --nemo_model starts with a warm-up",
            where="--lr_rewarm_step",
        )


def _optimizer_state(run: ResolvedRun, newest: Checkpoint) -> str:
    wanted = run.config.training.reset_optimizer
    saved = checkpoints.optimizer_layout(newest)
    layout = "distributed" if run.config.optimizer.distributed else run.precision
    # The same command starts the run again and again: the moments are dropped once.
    if wanted and (saved != layout or not newest.optimizer_was_reset):
        return "reset"
    if saved is None:
        raise CheckpointError(
            "it has no optimizer state",
            needed="the moments, to continue exactly",
            action="add --reset_optimizer to continue with new ones, or restore a complete checkpoint",
            where=str(newest.path),
        )
    if saved != layout:
        raise RequestError(
            f"the optimizer state of step {newest.step} was saved with {_LAYOUTS[saved]}, which can't be read with "
            f"{_LAYOUTS[layout]}",
            needed=f"{_LAYOUTS[saved]}, to continue as before",
            action="revert the change, or add --reset_optimizer: the moments start at zero",
            where="--set optimizer.distributed, --precision",
        )
    return "restored"
