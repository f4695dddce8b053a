"""What a start of a run does: what it loads, and at which step and sample it goes on. From files alone.

`pretrain.py --plan` prints it, every rank follows it, and the first rank records it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pretrainkit.config.run_file import write_run
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.logs import get_logger
from pretrainkit.run import checkpoints as resume
from pretrainkit.run import restarts
from pretrainkit.run.lr_schedule import schedule_of
from pretrainkit.run.retention import clear_away
from pretrainkit.run.trackers import check_trackers, wandb_run_id

RANDOM, WEIGHTS, CONTINUE = "random", "weights", "continue"
"""Start modes: from nothing, from trained weights with step 0, or with everything from the run's own checkpoint."""

_LAYOUTS = {
    "distributed": "optimizer.distributed true",
    "bf16": "optimizer.distributed false and precision bf16",
    "fp32": "optimizer.distributed false and precision fp32",
}
"""Of `resume.optimizer_layout`, in words."""

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
    """Passes over the dataset done; None for a blend, whose parts end at different times."""
    sample: int
    """Next sample, counted from 0 within the epoch (of a blend: from its beginning)."""
    learning_rate: float | None
    """Of the next step; None when all steps are done."""
    idle_restarts: int
    """Restarts in a row, up to now, without a new step."""
    wandb_run: str | None
    """Id of the W&B run that it goes on with; None: none, or a new one."""

    @property
    def is_done(self) -> bool:
        """Whether there is no step left."""
        return self.step >= self.max_steps

    def last_sample(self, run: ResolvedRun) -> int:
        """Training samples used once all steps are done; earlier steps may have had another batch size."""
        return self.consumed_samples + max(0, self.max_steps - self.step) * run.config.training.global_batch_size

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object."""
        return asdict(self)

    def describe(self) -> str:
        """The plan as aligned lines 'what  value'."""
        source = {RANDOM: "random weights", WEIGHTS: f"the weights of {self.checkpoint}", CONTINUE: self.checkpoint}
        moments = {"zero": "new", "restored": "restored", "reset": "reset: the checkpoint's moments are dropped"}
        where = f"sample {self.sample}" + ("" if self.epoch is None else f" of epoch {self.epoch + 1}")
        rate = "none left" if self.learning_rate is None else f"{self.learning_rate:.6g}"
        lines = {
            "start": {RANDOM: "from random weights", WEIGHTS: "from trained weights", CONTINUE: "continuing"}[
                self.mode
            ],
            "loads": source[self.mode],
            "step": f"{self.step} of {self.max_steps} done",
            "data": f"{self.consumed_samples} samples used, next is {where}",
            "optimizer": moments[self.optimizer_state],
            "next lr": rate,
            "restarts": f"{self.idle_restarts} in a row without a new step",
            **({"W&B run": self.wandb_run} if self.wandb_run else {}),
        }
        return "\n".join(f"{name:<10} {value}" for name, value in lines.items())


def plan_start(run: ResolvedRun) -> StartPlan:
    """The plan of the next start of `run`.

    Raises:
        CheckpointError: no checkpoint of those there is complete, or it lacks what must be restored.
        RequestError: the run can't go on with this batch size or kind of optimizer.
    """
    experiment = Path(run.experiment_dir)
    newest = resume.newest_complete(experiment / resume.CHECKPOINTS)
    step, consumed_samples = (newest.step, newest.consumed_samples) if newest else (0, 0)
    if newest is None:
        _refuse_lost_run(experiment)
    if newest:
        _check_batch(run, newest)
        mode, checkpoint, optimizer_state = CONTINUE, str(newest.path), _optimizer_state(run, newest)
    elif run.initial_checkpoint:
        mode, checkpoint, optimizer_state = WEIGHTS, run.initial_checkpoint, "zero"
    else:
        mode, checkpoint, optimizer_state = RANDOM, None, "zero"
    epoch, sample = (None, consumed_samples) if run.dataset.weights else divmod(consumed_samples, run.samples_per_epoch)
    return StartPlan(
        mode=mode,
        checkpoint=checkpoint,
        step=step,
        max_steps=run.max_steps,
        consumed_samples=consumed_samples,
        optimizer_state=optimizer_state,
        epoch=epoch,
        sample=sample,
        learning_rate=schedule_of(run).learning_rate(step) if step < run.max_steps else None,
        idle_restarts=restarts.idle_restarts(experiment / "metrics.jsonl"),
        wandb_run=wandb_run_id(run),
    )


def check_start(run: ResolvedRun) -> str:
    """The mode of the next start; raises what its first rank would raise. For the process that starts the ranks."""
    check_trackers(run)
    plan = plan_start(run)
    experiment = Path(run.experiment_dir)
    if plan.mode != CONTINUE and not (experiment / "metrics.jsonl").exists() and any(experiment.glob("logs/attempt_*")):
        # Attempts that failed before their first record leave this; so does a run whose files were lost.
        log.warning("attempts were made here, but no checkpoint and no metrics.jsonl: starting from the beginning")
    restarts.refuse_endless_restarts(run, _own_checkpoint(plan))
    return plan.mode


def prepare(run: ResolvedRun, plan: StartPlan) -> None:
    """What the first rank does before a start: stop endless restarts, put incomplete checkpoints aside, and clear away
    old ones, which a full disk may need before the first save.

    Raises PretrainkitError when the last restarts led nowhere.
    """
    checkpoints = Path(run.experiment_dir) / resume.CHECKPOINTS
    restarts.refuse_endless_restarts(run, _own_checkpoint(plan))
    resume.quarantine_incomplete(checkpoints)
    resume.remove_leftovers(checkpoints)
    clear_away(run)
    if run.start_mode != plan.mode:  # ranks that a requeued job starts anew, without pretrain.py
        write_run(Path(run.experiment_dir) / "run.json", replace(run, start_mode=plan.mode))
    for line in plan.describe().splitlines():
        log.info("%s", line)


def _own_checkpoint(plan: StartPlan) -> str | None:
    return plan.checkpoint if plan.mode == CONTINUE else None


def _refuse_lost_run(experiment: Path) -> None:
    """Refuse to begin anew where a checkpoint was saved once and is gone, or where nothing tells that none was."""
    if restarts.has_saved(experiment / "metrics.jsonl"):
        step = restarts.last_saved_step(experiment / "metrics.jsonl")
        raise CheckpointError(
            "no checkpoint is here, but metrics.jsonl tells of one that was saved"
            + ("; its line is torn" if step is None else f" at step {step}"),
            needed="a checkpoint"
            if step is None
            else f"{resume.CHECKPOINTS}/{resume.checkpoint_name(step)}, or an older one",
            action=f"restore one from a backup; {resume.BEGIN_ANEW}",
            where=str(experiment),
        )
    if resume.has_begun_saving(experiment / resume.CHECKPOINTS) and not (experiment / "metrics.jsonl").exists():
        raise CheckpointError(
            f"a checkpoint without {resume.COMMIT_MARK}, and no metrics.jsonl that tells whether it was the first",
            needed="metrics.jsonl, which is there before the first save begins, or a complete checkpoint",
            action=f"restore them from a backup; {resume.BEGIN_ANEW}",
            where=str(experiment),
        )


def _check_batch(run: ResolvedRun, newest: resume.Checkpoint) -> None:
    """Refuse another batch size without --allow_batch_change, and an epoch that can't be counted in steps."""
    training = run.config.training
    size, saved_size = training.global_batch_size, newest.global_batch_size
    if saved_size not in (None, size) and not training.allow_batch_change:
        raise RequestError(
            f"the checkpoint of step {newest.step} was trained with {saved_size} samples a step, now {size}",
            needed=f"{saved_size}, to continue as before",
            action="take it back, or add --allow_batch_change: steps and used samples count on, and the learning rate "
            "still follows the steps",
            where="--global_batch_size",
        )
    if training.max_steps is None and newest.consumed_samples != newest.step * size:
        raise RequestError(
            f"one epoch can't be counted in steps: {newest.consumed_samples} samples were used in {newest.step} steps, "
            f"a step takes {size} now",
            needed="the number of steps",
            action=f"set it; the rest of this epoch is {_rest_of_epoch(run, newest) // size} steps more, up to step "
            f"{newest.step + _rest_of_epoch(run, newest) // size}",
            where="--max_steps",
        )


def _rest_of_epoch(run: ResolvedRun, newest: resume.Checkpoint) -> int:
    return run.samples_per_epoch - newest.consumed_samples % run.samples_per_epoch


def _optimizer_state(run: ResolvedRun, newest: resume.Checkpoint) -> str:
    wanted = run.config.training.reset_optimizer
    saved = resume.optimizer_layout(newest)
    layout = "distributed" if run.config.optimizer.distributed else run.precision
    # The same command starts the run again and again: the moments are dropped once.
    if wanted and (saved != layout or not newest.optimizer_was_reset):
        return "reset"
    if saved is None:
        raise CheckpointError(
            "it holds no optimizer state",
            needed="the moments, to continue exactly",
            action="add --reset_optimizer to go on with new ones, or restore a whole checkpoint",
            where=str(newest.path),
        )
    if saved != layout:
        raise RequestError(
            f"the optimizer state of step {newest.step} was saved with {_LAYOUTS[saved]}, which can't be read with "
            f"{_LAYOUTS[layout]}",
            needed=f"{_LAYOUTS[saved]}, to continue as before",
            action="take it back, or add --reset_optimizer: the moments begin at zero",
            where="--set optimizer.distributed, --precision",
        )
    return "restored"
