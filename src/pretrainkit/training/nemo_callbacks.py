"""Where NeMo's trainer meets our decisions: learning rate, checkpoints, records, stopping."""

from __future__ import annotations

import math
import resource
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from megatron.core import parallel_state
from nemo import lightning as nl
from nemo.lightning.pytorch.optim.base import LRSchedulerModule

from pretrainkit.checkpoint.targets import carry_hf_files
from pretrainkit.config.schema import ResolvedRun, TrainingConfig
from pretrainkit.errors import CheckpointError, PretrainkitError
from pretrainkit.logs import get_logger
from pretrainkit.training import resume
from pretrainkit.training.dataset import documents_of_samples
from pretrainkit.training.loss_judge import LossJudge
from pretrainkit.training.records import RunRecorder
from pretrainkit.training.schedule import Schedule, schedule_of
from pretrainkit.training.start_plan import StartPlan
from pretrainkit.units import parse_duration

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send before a job's time is over."""

MAX_SKIPPED_IN_A_ROW = 10
"""Bad steps that are skipped one after another before the run stops: by then it is the weights, not the data."""

log = get_logger(__name__)


class LearningRate(LRSchedulerModule):
    """Our schedule as NeMo wants it."""

    def __init__(self, schedule: Schedule, weight_decay: float) -> None:
        super().__init__()
        self.schedule, self.weight_decay = schedule, weight_decay

    def scheduler(self, model: Any, optimizers: Any) -> dict[str, Any]:
        scheduler = _StepScheduler(optimizers, self.schedule, self.weight_decay)
        return {
            "optimizer": optimizers,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1},
            "monitor": "val_loss",
        }


class _StepScheduler(torch.optim.lr_scheduler.LRScheduler):
    """Sets learning rate and weight decay from the step and this run's settings, never from a checkpoint.

    Only the step is saved: a checkpoint's parameter groups hold the old run's values, and a resumed run that
    was given others must use the others.
    """

    def __init__(self, megatron_optimizer: Any, schedule: Schedule, weight_decay: float) -> None:
        self.schedule, self.weight_decay = schedule, weight_decay
        super().__init__(megatron_optimizer)

    def get_lr(self) -> list[float]:
        return [self.schedule.learning_rate(self.last_epoch)] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = self.get_lr()
        for group, value in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = value
            group["weight_decay"] = self.weight_decay * group.get("pre_wd_mult", 1.0)


class AsPlanned(pl.Callback):
    """Makes sure that what the engine restored is what the plan said, before the first step."""

    def __init__(self, plan: StartPlan) -> None:
        self._plan = plan

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plan = self._plan
        found = (trainer.global_step, trainer.datamodule.state_dict()["consumed_samples"])
        if found != (plan.step, plan.consumed_samples):
            raise CheckpointError(
                f"the engine goes on at step {found[0]} and sample {found[1]}",
                needed=f"step {plan.step} and sample {plan.consumed_samples}, as planned",
                action="this is a bug, or the files changed in between: start again",
                where=str(plan.checkpoint),
            )
        if plan.optimizer_state == "reset":
            # The fp32 copies of bf16 weights were made before the checkpoint's weights were loaded.
            for optimizer in trainer.strategy.optimizers:
                optimizer.reload_model_params()


class Checkpoints(nl.ModelCheckpoint):
    """Saves every so many steps and after the last one.

    Each checkpoint carries the model's config and tokenizer, for the way back to Hugging Face, and ends with our
    commit mark.
    """

    def __init__(self, run: ResolvedRun, recorder: RunRecorder | None) -> None:
        super().__init__(
            monitor=None,
            save_last=False,
            save_top_k=-1,
            save_optim_on_train_end=True,
            auto_insert_metric_name=False,
            verbose=False,
            dirpath=str(Path(run.experiment_dir) / resume.CHECKPOINTS),
            every_n_train_steps=run.config.training.save_interval,
        )
        self._run, self._recorder = run, recorder

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step != self._last_global_step_saved:
            self._save_checkpoint(trainer, "")

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        # Lightning's own name counts the step that was just done as not done.
        folder = Path(str(self.dirpath)) / resume.checkpoint_name(trainer.global_step)
        super()._save_checkpoint(trainer, f"{folder}{self.FILE_EXTENSION}")
        if trainer.is_global_zero:
            carry_hf_files(Path(self._run.hf_folder), folder)
            consumed_samples = trainer.datamodule.state_dict()["consumed_samples"]
            training = self._run.config.training
            resume.commit(
                folder,
                step=trainer.global_step,
                consumed_samples=consumed_samples,
                global_batch_size=training.global_batch_size,
                optimizer_was_reset=training.reset_optimizer,
            )
            if self._recorder:
                self._recorder.event("checkpoint", step=trainer.global_step, path=str(folder))
                self._recorder.skip_time()
            for old in resume.expired(folder.parent, keep_last=training.keep_last, keep_every=training.keep_every):
                log.info("removing %s", old.path)
                resume.remove(old)


class Recording(pl.Callback):
    """Hands the numbers of each step to the recorder."""

    def __init__(self, run: ResolvedRun, recorder: RunRecorder | None) -> None:
        self._run, self._recorder = run, recorder
        self._schedule = schedule_of(run)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder:
            self._recorder.start(trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if not self._recorder or (step % self._run.config.training.log_interval and step != self._run.max_steps):
            return
        metrics = trainer.callback_metrics
        grad_norm = metrics.get("grad_norm")
        self._recorder.train_step(
            step,
            loss=float(metrics["reduced_train_loss"]),
            learning_rate=self._schedule.learning_rate(step - 1),
            grad_norm=None if grad_norm is None else float(grad_norm),
            peak_memory_gib=_peak_memory_gib(self._run.accelerator),
        )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder:
            self._recorder.validation(trainer.global_step, loss=float(trainer.callback_metrics["val_loss"]))
            self._recorder.skip_time()


class LossGuard(pl.Callback):
    """Keeps a step whose loss or gradient norm is bad from changing the weights, on all ranks alike.

    Judged between the backward pass and the update: the last pipeline stage knows the loss, averaged over all data
    parallel ranks, every rank knows the norm, and one of them is enough to skip the update on all.
    """

    def __init__(self, run: ResolvedRun, recorder: RunRecorder | None) -> None:
        self._run, self._recorder = run, recorder
        self._judge = LossJudge(run.config.training.max_loss_spike)
        self._loss: Any = None
        self._grad_norm = 0.0
        self._skipped_in_a_row = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        training_step = strategy.training_step

        def noted_training_step(*args: Any, **kwargs: Any) -> Any:
            output = training_step(*args, **kwargs)
            self._loss = output if torch.is_tensor(output) else output["loss"]
            return output

        strategy.training_step = noted_training_step
        for optimizer in strategy.optimizers:
            self._guard(optimizer.mcore_optimizer, trainer)

    def _guard(self, optimizer: Any, trainer: pl.Trainer) -> None:
        get_grad_norm, step = optimizer.get_grad_norm, optimizer.step_with_ready_grads

        def noted_grad_norm() -> Any:
            norm = get_grad_norm()
            self._grad_norm = float(norm)
            return norm

        def guarded_step() -> bool:
            if self._is_good(trainer):
                return step()
            # Moments are made in the first update; a checkpoint needs them even if there was none yet.
            for part in optimizer.chained_optimizers:
                part.init_state_fn(part.optimizer, part.config)
            return False

        optimizer.get_grad_norm, optimizer.step_with_ready_grads = noted_grad_norm, guarded_step

    def _is_good(self, trainer: pl.Trainer) -> bool:
        loss = float(self._loss)
        bad_loss = self._judge.problem(loss) if parallel_state.is_pipeline_last_stage() else ""
        bad_norm = "" if math.isfinite(self._grad_norm) else f"the gradient norm is {self._grad_norm}"
        flags = [bool(bad_loss), bool(bad_norm)]
        bad = torch.tensor(flags, dtype=torch.int32, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX)
        if not bad.any().item():
            self._judge.accept(loss)
            self._skipped_in_a_row = 0
            return True
        # The first rank is of the first stage, which was sent the loss; only the last one judges it.
        what = bad_loss or self._judge.problem(loss) or bad_norm or "a bad loss on another rank"
        self._skipped_in_a_row += 1
        give_up = self._skipped_in_a_row > MAX_SKIPPED_IN_A_ROW
        stop = give_up or self._run.config.training.on_bad_loss == "stop"
        self._report(trainer, what, loss, stop=stop)
        if stop:
            raise PretrainkitError(
                f"step {trainer.global_step + 1}: {what}" + (", as in the steps before" if give_up else ""),
                needed="a finite loss" + (", no spike" if self._run.config.training.max_loss_spike else ""),
                action="look at the documents of this batch, named in metrics.jsonl (event bad_loss); "
                "--on_bad_loss skip leaves such steps out",
                where=self._run.experiment_dir,
            )
        return False

    def _report(self, trainer: pl.Trainer, what: str, loss: float, *, stop: bool) -> None:
        if not self._recorder:
            return
        first = trainer.datamodule.state_dict()["consumed_samples"]
        samples = range(first, first + self._run.config.training.global_batch_size)
        documents = documents_of_samples(trainer.datamodule._train_ds, samples)
        self._recorder.bad_loss(
            trainer.global_step + 1,
            problem=what,
            loss=loss,
            grad_norm=self._grad_norm,
            samples=samples,
            documents=documents,
            skipped=not stop,
        )


class StopEarly(pl.Callback):
    """Ends training after the step in which any rank got a signal or ran out of time; that step is then saved.

    Schedulers signal some ranks sooner than others, or only one, and clocks differ: after each step the ranks
    agree, so that all stop at the same one.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._asked = False
        self._deadline_s = math.inf
        if training.time_limit:
            allowed_s = parse_duration(training.time_limit) - parse_duration(training.time_margin)
            self._deadline_s = psutil.Process().create_time() + allowed_s
        for number in STOP_SIGNALS:
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: Any) -> None:
        log.warning("got %s: stopping after this step", signal.Signals(number).name)
        self._asked = True

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if not self._asked and time.time() > self._deadline_s:
            log.warning("the time limit is near: stopping after this step")
            self._asked = True
        asked = torch.tensor([self._asked], dtype=torch.int32, device=trainer.strategy.root_device)
        torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        if asked.item():
            trainer.should_stop = True


def _peak_memory_gib(accelerator: str) -> float:
    """The most memory that this rank has used: of its GPU by torch's allocator, on CPU of the process."""
    if accelerator == "gpu":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
