"""What is prepared before steps: CUDA graphs of the layers, garbage collection, and the optimizer's settings."""

from __future__ import annotations

import gc
from typing import Any

import lightning.pytorch as pl

from pretrainkit.config.schema import Kernels, ResolvedRun
from pretrainkit.megatron import cuda_graphs
from pretrainkit.run.lr_schedule import schedule_of


class OptimizerSettings(pl.Callback):
    """Sets learning rate, weight decay, betas and eps before each step, from the step and this run's settings.

    They never come from a checkpoint, whose parameter groups hold the values of the run that wrote it.
    """

    def __init__(self, run: ResolvedRun) -> None:
        self._schedule, self._settings = schedule_of(run), run.config.optimizer

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        settings, learning_rate = self._settings, self._schedule.learning_rate(trainer.global_step)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"], group["eps"] = learning_rate, settings.adam_eps
                group["betas"] = (settings.adam_beta1, settings.adam_beta2)
                group["weight_decay"] = settings.weight_decay * group.get("pre_wd_mult", 1.0)


class UseCudaGraphs(pl.Callback):
    """Runs the layers as CUDA graphs, if the run's kernels say so."""

    def __init__(self, chosen: Kernels) -> None:
        self._chosen, self._layers = chosen, list[cuda_graphs.GraphedLayers]()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._chosen.cuda_graphs == "graphs":
            self._layers = [cuda_graphs.install(chunk.module) for chunk in trainer.strategy.megatron_parallel]

    @property
    def uncounted_gib(self) -> float:
        """Memory that graphs use and torch's allocator counts as free."""
        return sum(layers.uncounted_bytes for layers in self._layers) / 2**30


class FreezeGC(pl.Callback):
    """Excludes the objects made during setup from garbage collection.

    They live until the end, and a full collection over them during a step stalls the GPU (30 ms were seen).
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gc.collect()
        gc.freeze()
