"""Where NeMo's trainer meets our decisions: learning rate, what was planned, records."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.datasets.blended_dataset import BlendedDataset
from nemo.lightning.pytorch.optim.base import LRSchedulerModule

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.callbacks.loss_guard import LossGuard
from pretrainkit.engine.loss_check import Parity, RefusedWeights, measure
from pretrainkit.errors import CheckpointError
from pretrainkit.logs import get_logger
from pretrainkit.megatron import cuda_graphs
from pretrainkit.megatron.dataset import shares_drawn
from pretrainkit.megatron.kernels import Kernels
from pretrainkit.run.lr_schedule import Schedule, schedule_of
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.run.resume_plan import StartPlan

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
    """Sets learning rate, weight decay, betas and eps from the step and this run's settings, never from a checkpoint.

    Only the step is saved: a checkpoint's parameter groups hold the old run's values, and a resumed run that
    was given others must use the others.
    """

    def __init__(self, megatron_optimizer: Any, schedule: Schedule, weight_decay: float) -> None:
        self.schedule, self.weight_decay = schedule, weight_decay
        # Nothing is restored yet: the groups hold what this run asks for.
        self._adam = [{name: group[name] for name in ("betas", "eps")} for group in megatron_optimizer.param_groups]
        super().__init__(megatron_optimizer)

    def get_lr(self) -> list[float]:
        return [self.schedule.learning_rate(self.last_epoch)] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self._last_lr = self.get_lr()
        for group, value, adam in zip(self.optimizer.param_groups, self._last_lr, self._adam, strict=True):
            group.update(adam, lr=value)
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


class StartParity(pl.Callback):
    """Compares the loaded model with its Hugging Face original, before the first step."""

    def __init__(self, parity: Parity, forward_step: Callable[..., Any], recorder: RunRecorder | None) -> None:
        self._parity, self._forward_step, self._recorder = parity, forward_step, recorder

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        try:
            record = self._parity.compare(
                lambda reference: measure(
                    list(strategy.megatron_parallel), self._forward_step, reference, strategy.root_device
                )
            )
        except RefusedWeights as refused:
            self._record({"result": "refused", **refused.verdict.to_json()})
            raise
        self._record(record)

    def _record(self, record: dict[str, Any]) -> None:
        if self._recorder:
            self._recorder.event("start_parity", **record)


class TensorBoard:
    """The records as TensorBoard's files; a tracker like those of `trackers`.

    Lightning's trainer doesn't get the logger: it would ask the GPU for numbers after every step, and wait.
    """

    def __init__(self, experiment: Path, first_step: int) -> None:
        """`first_step`: steps done before; later ones, of an attempt that was killed, are shown as done again."""
        self._logger = TensorBoardLogger(
            save_dir=str(experiment), name="tensorboard", version="", purge_step=first_step + 1
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write the numbers of a step."""
        self._logger.log_metrics(values, step)

    def finish(self) -> None:
        """Write what is left."""
        self._logger.finalize("success")


class FrozenStart(pl.Callback):
    """Takes what the start has made out of Python's collections of garbage.

    It lives to the end, and is so much that looking at it in the midst of a step lets the GPU run dry (30 ms seen).
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gc.collect()
        gc.freeze()


class GraphedModel(pl.Callback):
    """Lets the layers be replayed as CUDA graphs, if the run is to do so."""

    def __init__(self, chosen: Kernels) -> None:
        self._chosen, self._layers = chosen, list[cuda_graphs.GraphedLayers]()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._chosen.cuda_graphs == "graphs":
            self._layers = [cuda_graphs.install(chunk.module) for chunk in trainer.strategy.megatron_parallel]

    @property
    def uncounted_gib(self) -> float:
        """Memory that replays use and torch's allocator counts as free."""
        return sum(layers.uncounted_bytes for layers in self._layers) / 2**30


class Recording(pl.Callback):
    """Hands the numbers of each step to the recorder, without waiting for the GPU."""

    def __init__(
        self, run: ResolvedRun, plan: StartPlan, recorder: RunRecorder | None, guard: LossGuard, graphed: GraphedModel
    ) -> None:
        self._run, self._plan, self._recorder, self._guard, self._graphed = run, plan, recorder, guard, graphed
        self._schedule = schedule_of(run)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        log_metric = pl_module.log

        def log_validation(name: str, *args: Any, **kwargs: Any) -> None:
            # NeMo's numbers of a training step are known from the guard; Lightning would wait for them.
            if name == "val_loss":
                log_metric(name, *args, **kwargs)

        pl_module.log = log_validation
        if self._recorder:
            evaluations = trainer.fit_loop.epoch_loop.val_loop
            evaluations.run = self._without_its_time(evaluations.run, self._recorder)
            self._record_mixture(trainer, self._recorder)
            self._recorder.start(trainer.global_step)

    def _without_its_time(self, evaluate: Callable[[], Any], recorder: RunRecorder) -> Callable[[], Any]:
        """An evaluation whose time isn't the steps': the whole of it, as its first starts processes that read data."""

        def run() -> Any:
            wait_for_device(self._run.accelerator)
            began_s = time.monotonic()
            try:
                return evaluate()
            finally:
                recorder.skip_time(time.monotonic() - began_s)

        return run

    def _record_mixture(self, trainer: pl.Trainer, recorder: RunRecorder) -> None:
        """Tell the share of each dataset among the samples that are still to come, beside the share asked for."""
        dataset = trainer.datamodule._train_ds
        samples = range(self._plan.consumed_samples, self._plan.last_sample(self._run))
        if not isinstance(dataset, BlendedDataset) or not samples:
            return
        drawn, asked = shares_drawn(dataset, samples), self._run.dataset.weights
        shares = {
            prefix: {"drawn": share, "asked": weight / sum(asked)}
            for prefix, share, weight in zip(self._run.dataset.prefixes, drawn, asked, strict=True)
        }
        for prefix, share in shares.items():
            log.info("%s: %.2f%% of the samples, %.2f%% asked", prefix, 100 * share["drawn"], 100 * share["asked"])
        recorder.event("mixture", num_samples=len(samples), shares=shares)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if not self._recorder or (step % self._run.config.training.log_interval and step != self._run.max_steps):
            return
        self._recorder.train_step(
            step,
            consumed_samples=trainer.datamodule.state_dict()["consumed_samples"],
            loss=self._guard.loss,
            learning_rate=self._schedule.learning_rate(step - 1),
            grad_norm=self._guard.grad_norm,
            peak_memory_gib=_peak_memory_gib(self._run.accelerator) + self._graphed.uncounted_gib,
        )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder and not trainer.should_stop:  # a stop cuts the evaluation short
            self._recorder.validation(trainer.global_step, loss=float(trainer.callback_metrics["val_loss"]))


def wait_for_device(accelerator: str) -> None:
    """Let the GPU end the update of the step that is being recorded, so that its time is not counted elsewhere."""
    if accelerator == "gpu":
        torch.cuda.synchronize()


def _peak_memory_gib(accelerator: str) -> float:
    """The most memory that this rank has used: of its GPU by torch's allocator, on CPU of the process."""
    if accelerator == "gpu":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB
