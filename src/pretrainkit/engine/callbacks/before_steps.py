"""Before steps: seeds, the check of the restored state, the optimizer's settings, layers, garbage collection."""

from __future__ import annotations

import gc
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    reconfigure_num_microbatches_calculator,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from pretrainkit.config.batch_size import batch_size_at
from pretrainkit.config.schema import Kernels, ResolvedRun
from pretrainkit.engine.agreement import all_ranks_any
from pretrainkit.errors import CheckpointError
from pretrainkit.megatron import cuda_graphs
from pretrainkit.run.lr_schedule import learning_rate
from pretrainkit.run.resume_plan import StartPlan

_MAX_NAMES = 8


class VerifyRestoredState(pl.Callback):
    """Raises CheckpointError, on every rank, when step, sample or any weight was not restored.

    Megatron builds a model with random weights and fills it afterwards. A tensor that is missing from the checkpoint,
    has another name there or is silently left out would be trained from its random values. So weights are NaN from
    before the load until they are loaded, which takes no memory.
    """

    def __init__(self, plan: StartPlan) -> None:
        self._plan = plan

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        load, restore = strategy.load_checkpoint, strategy.load_model_state_dict

        # Lightning says whether to load weights only, which NeMo's strategy doesn't take.
        def load_checkpoint(*args: Any, weights_only: bool | None = None, **kwargs: Any) -> Any:
            with torch.no_grad():
                for parameter in strategy.megatron_parallel.parameters():
                    parameter.fill_(torch.nan)
            return load(*args, **kwargs)

        def load_model_state_dict(*args: Any, **kwargs: Any) -> Any:
            result = restore(*args, **kwargs)
            _check_weights(strategy.megatron_parallel)
            return result

        strategy.load_checkpoint, strategy.load_model_state_dict = load_checkpoint, load_model_state_dict

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        plan = self._plan
        found = (trainer.global_step, trainer.datamodule.state_dict()["consumed_samples"])
        if found != (plan.step, plan.consumed_samples):
            raise CheckpointError(
                f"training would continue at step {found[0]} and sample {found[1]}",
                needed=f"step {plan.step} and sample {plan.consumed_samples}, as planned",
                action="this is a bug, or the files changed in between: start again",
                where=str(plan.checkpoint),
            )
        if plan.optimizer_state == "reset":
            # The fp32 copies of bf16 weights were made before the checkpoint's weights were loaded.
            for optimizer in trainer.strategy.optimizers:
                optimizer.reload_model_params()


class OptimizerSettings(pl.Callback):
    """Sets learning rate, weight decay, betas and eps before each step, from the step and this run's settings.

    They never come from a checkpoint, whose parameter groups hold the values of the run that wrote it.
    """

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        settings, rate = self._run.config.optimizer, learning_rate(self._run, trainer.global_step)
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"], group["eps"] = rate, settings.adam_eps
                group["betas"] = (settings.adam_beta1, settings.adam_beta2)
                group["weight_decay"] = settings.weight_decay * group.get("pre_wd_mult", 1.0)


class BatchSizeWarmup(pl.Callback):
    """Sets the microbatches of each step by the samples that are used; evaluations have full batches."""

    def __init__(self, run: ResolvedRun) -> None:
        self._run = run

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._set(batch_size_at(self._run.config.training, trainer.datamodule.state_dict()["consumed_samples"]))

    def on_validation_start(self, *_: Any) -> None:
        self._set(self._run.config.training.global_batch_size)

    def _set(self, batch_size: int) -> None:
        if batch_size != get_current_global_batch_size():
            micro_batch_size, data_parallel = self._run.config.training.micro_batch_size, self._run.data_parallel_size
            reconfigure_num_microbatches_calculator(0, None, batch_size, micro_batch_size, data_parallel)


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


class SeedWeights(pl.Callback):
    """Seeds the generators of Megatron's matrices on GPUs with the run's seed; NeMo takes 1234, whatever the run's is.

    To be called after the ranks have met and before the model is built. Pipeline stages differ, as in Megatron.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if torch.cuda.is_available():
            model_parallel_cuda_manual_seed(self._seed + 100 * parallel_state.get_pipeline_model_parallel_rank())


class FreezeGC(pl.Callback):
    """Excludes the objects made during setup from garbage collection.

    They live until the end, and a full collection over them during a step stalls the GPU (30 ms were seen).
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        gc.collect()
        gc.freeze()


def _check_weights(model: torch.nn.Module) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter.isnan().any()]
    if not all_ranks_any(bool(names)):
        return
    here = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    raise CheckpointError(
        f"weights that are NaN or were not in the checkpoint: {here or 'on other ranks'}",
        needed="a checkpoint with every weight of the model",
        action="convert the model again with tools/convert_checkpoint.py, or take an older checkpoint",
    )
