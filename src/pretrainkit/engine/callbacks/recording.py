"""The records of a run during NeMo's training: each step, evaluations, and the mixture of datasets."""

from __future__ import annotations

import dataclasses
import functools
import resource
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from megatron.core.datasets.blended_dataset import BlendedDataset

from pretrainkit.config.blend_schedule import blend_segments
from pretrainkit.config.schema import Kernels, ResolvedRun
from pretrainkit.engine.callbacks.before_steps import UseCudaGraphs
from pretrainkit.engine.callbacks.loss_guard import LossGuard
from pretrainkit.engine.loss_by_label import LossByLabel
from pretrainkit.engine.router_load import WINDOW_STEPS, RouterLoad
from pretrainkit.logs import get_logger
from pretrainkit.megatron.attention_kernels import attention_kernel
from pretrainkit.megatron.blend import shares_drawn
from pretrainkit.run.attempts import read_attempts
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.gpu_specs import peak_flops
from pretrainkit.run.held_out import validation_record
from pretrainkit.run.lr_schedule import learning_rate
from pretrainkit.run.metrics import RunRecorder
from pretrainkit.run.resume_plan import StartPlan
from pretrainkit.run.trackers import open_trackers
from pretrainkit.signals import RankStopRequests

log = get_logger(__name__)


def begin_recorder(run: ResolvedRun, plan: StartPlan, chosen: Kernels, requests: RankStopRequests) -> RunRecorder:
    """The recorder of this attempt, with its start recorded and its trackers open."""
    folder = RunFolder.of(run)
    # The evaluation before the first step has the number of the step before it.
    begin = plan.step - plan.is_first
    furthest = max((attempt.last_step for attempt in read_attempts(folder)), default=begin)
    peak = peak_flops(torch.cuda.get_device_name()) if run.accelerator == "gpu" else None
    recorder = RunRecorder(run, peak_flops=peak)
    attention = "te" if chosen.layer_spec == "te" else attention_kernel(run)
    used = {**dataclasses.asdict(chosen), "attention": attention}
    # Recorded before the trackers are opened: a start that fails there counts as a restart, too.
    recorder.event("start", **dataclasses.asdict(plan), world_size=run.world_size, kernels=used)
    requests.note_end_by(functools.partial(recorder.event, "stopped", step=plan.step))
    # Lightning's trainer doesn't get the logger: it would read numbers from the GPU after every step, and wait.
    board = _Board(str(folder.path), "tensorboard", "", purge_step=begin + 1)  # replaces later steps
    recorder.trackers = [board, *open_trackers(run, first_step=begin, recorded_step=furthest)]
    on_gpu = "" if run.accelerator == "cpu" else f", attention by {attention}"
    log.info("kernels: %s%s", chosen.describe(run.accelerator), on_gpu)
    log.debug("kernels: %s, attention %s", chosen, attention)
    log.info("starting at step %d of %d", plan.step, run.max_steps)
    return recorder


class _Board(TensorBoardLogger):
    """TensorBoard's files in the folder of that name: Lightning would replace variables in the path, such as $HOME."""

    @property
    def log_dir(self) -> str:
        return self.root_dir


class Recording(pl.Callback):
    """Passes the numbers of each step to the recorder, without waiting for the GPU."""

    def __init__(
        self,
        run: ResolvedRun,
        plan: StartPlan,
        recorder: RunRecorder | None,
        guard: LossGuard,
        graphs: UseCudaGraphs,
        held_out: LossByLabel,
        by_label: LossByLabel | None = None,
        router_load: RouterLoad | None = None,
    ) -> None:
        self._run, self._plan, self._recorder, self._guard, self._graphs = run, plan, recorder, guard, graphs
        self._held_out, self._by_label, self._router_load = held_out, by_label, router_load

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # LossGuard knows the numbers of a step, `held_out` those of an evaluation; Lightning would wait for the GPU.
        pl_module.log = lambda *args, **kwargs: None
        if self._recorder:
            evaluations = trainer.fit_loop.epoch_loop.val_loop
            evaluations.run = functools.partial(self._untimed, evaluations.run, self._recorder)
            self._record_mixture(trainer, self._recorder)
            self._recorder.start(trainer.global_step, self._plan.consumed_samples)

    def _untimed(self, evaluate: Callable[[], Any], recorder: RunRecorder) -> Any:
        """Evaluate, with that time kept out of the steps' time; the first one also starts DataLoader workers."""
        wait_for_device(self._run.accelerator)
        began_s = time.monotonic()
        try:
            return evaluate()
        finally:
            recorder.skip_time(time.monotonic() - began_s)

    def _record_mixture(self, trainer: pl.Trainer, recorder: RunRecorder) -> None:
        """Record the share of each dataset among the remaining samples of each segment, and the share asked for."""
        dataset = trainer.datamodule._train_ds
        place = self._plan.skipped.place
        begin, end = place(self._plan.consumed_samples), place(self._plan.last_sample(self._run))
        segments = blend_segments(self._run.config.training, self._run.dataset)
        ends = [*(segment.first_sample for segment in segments[1:]), end]
        for segment, segment_end in zip(segments, ends, strict=True):
            samples = range(max(segment.first_sample, begin), min(segment_end, end))
            if not isinstance(dataset, BlendedDataset) or not samples:
                continue
            drawn, asked = shares_drawn(dataset, samples), segment.weights
            shares = {
                prefix: {"drawn": share, "asked": weight / sum(asked)}
                for prefix, share, weight in zip(self._run.dataset.prefixes, drawn, asked, strict=True)
            }
            step = max(segment.step, self._plan.step)
            for prefix, share in shares.items():
                found = 100 * share["drawn"], 100 * share["asked"]
                log.info("from step %d on, %s: %.2f%% of the samples, %.2f%% asked", step, prefix, *found)
            recorder.event("mixture", from_step=step, num_samples=len(samples), shares=shares)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if not self._recorder or (step % (self._run.config.training.log_interval or 1) and step != self._run.max_steps):
            return
        on_gpu, usage = self._run.accelerator == "gpu", resource.getrusage(resource.RUSAGE_SELF)
        peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else 1024 * usage.ru_maxrss  # Linux counts in KiB
        self._recorder.train_step(
            step,
            consumed_samples=trainer.datamodule.state_dict()["consumed_samples"],
            loss=self._guard.loss,
            learning_rate=learning_rate(self._run, step - 1),
            grad_norm=self._guard.grad_norm,
            peak_memory_gib=peak_bytes / 2**30 + self._graphs.uncounted_gib,
            by_label=self._by_label.take() if self._by_label else None,
            router=self._router_load.take() if self._router_load else None,
        )
        if self._router_load and (step % WINDOW_STEPS == 0 or step == self._run.max_steps):
            self._recorder.event("expert_load", step=step, layers=self._router_load.take_window())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._held_out.finish_step()
        losses, tokens = self._held_out.take_sums()
        if self._recorder and not trainer.should_stop:  # a stop cuts the evaluation short
            fields = validation_record(self._run, self._held_out.names, losses, tokens)
            self._recorder.validation(trainer.global_step, fields)


def wait_for_device(accelerator: str) -> None:
    """Wait until the GPU has finished the step that is being recorded, so that its time is not counted elsewhere."""
    if accelerator == "gpu":
        torch.cuda.synchronize()
