"""What prepares the process when training starts: CUDA graphs of the layers, and garbage collection."""

from __future__ import annotations

import gc

import lightning.pytorch as pl

from pretrainkit.config.schema import Kernels
from pretrainkit.megatron import cuda_graphs


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
