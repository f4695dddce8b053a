"""FP8 training: weights are cast once a step, and FP8's loss is compared with bf16's (--fp8_check_interval)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor
from torch.utils.data import default_collate

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.engine.callbacks.initial_loss_check import unchanged_random_state, without_gather_hooks
from pretrainkit.errors import PretrainkitError
from pretrainkit.logs import get_logger
from pretrainkit.megatron.fp8 import weights
from pretrainkit.megatron.fp8.module import Fp8Module, in_bf16
from pretrainkit.megatron.fp8.stats import merged
from pretrainkit.run.metrics import RunRecorder

MAX_DIFFERENCE = 0.1
"""How far the loss of the same weights and tokens may differ between FP8 and bf16, in nats.

Measured with SmolLM2-135M on 1,024 tokens of English: 0.025 with scales by row, 0.035 by tensor. Larger models differ
less.
"""

log = get_logger(__name__)


class Fp8Check(pl.Callback):
    """Lets the FP8 copies of weights expire, compares losses, and records the scales of all casts."""

    def __init__(self, run: ResolvedRun, recorder: RunRecorder | None) -> None:
        self._run, self._recorder = run, recorder
        self._is_first = True
        self._losses: dict[str, float] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Raise PretrainkitError on every rank where FP8's loss is too far from bf16's."""
        weights.expire()
        step, interval = trainer.global_step, self._run.config.training.fp8_check_interval
        is_first, self._is_first = self._is_first, False
        if not interval or (step % interval and not is_first):
            return
        strategy: Any = trainer.strategy
        chunks, batch = list(strategy.megatron_parallel), self._samples(trainer)
        # Before the first step no parameters are on their way to this rank.
        with without_gather_hooks(chunks) if is_first else nullcontext():
            fp8 = self._loss(chunks, pl_module, batch, strategy.root_device)
            with in_bf16():
                bf16 = self._loss(chunks, pl_module, batch, strategy.root_device)
        self._losses = {"fp8_loss": fp8, "bf16_loss": bf16}
        if not abs(fp8 - bf16) <= MAX_DIFFERENCE and math.isfinite(bf16):
            self._record(trainer)
            raise PretrainkitError(
                f"before step {step + 1}: loss {fp8:.4f} in FP8 and {bf16:.4f} in bf16, of the same weights and tokens",
                needed=f"a difference of at most {MAX_DIFFERENCE} nats",
                action="continue with --precision bf16, or with --fp8_first_last_bf16 1; metrics.jsonl has the "
                "ranges of the tensors (event fp8)",
                where=self._run.experiment_dir,
            )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._losses:
            self._record(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weights.expire()

    def _record(self, trainer: pl.Trainer) -> None:
        losses, self._losses = self._losses, {}
        if not self._recorder:
            return
        modules = (module for chunk in trainer.strategy.megatron_parallel for module in chunk.modules())
        found = merged(
            {f"{name} {kind}": range_ for kind, range_ in stats.read().items()}
            for module in modules
            if isinstance(module, Fp8Module)
            for name, stats in module.stats().items()
        )
        tensors = {name: dataclasses.asdict(range_) for name, range_ in found.items()}
        self._recorder.event("fp8", step=trainer.global_step, **losses, tensors=tensors)
        worst = max(found, key=lambda name: found[name].underflow, default="")
        shown = f"; most underflow: {found[worst].underflow:.2%} of {worst}" if worst else ""
        log.info("loss in FP8 %.4f, in bf16 %.4f%s", losses["fp8_loss"], losses["bf16_loss"], shown)

    def _samples(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        """This rank's first microbatch of the next step."""
        size = self._run.config.training.micro_batch_size
        first = trainer.datamodule.state_dict()["consumed_samples"]
        first += size * parallel_state.get_data_parallel_rank()
        return default_collate([trainer.datamodule._train_ds[first + number] for number in range(size)])

    def _loss(self, chunks: list[Any], pl_module: Any, batch: dict[str, Tensor], device: torch.device) -> float:
        """The mean loss over all ranks' tokens of the batch; weights, gradients and random states don't change."""

        def step(_: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
            microbatch = pl_module.microbatch_step(iter([batch]))
            mask = microbatch.get("loss_mask")

            def sums(losses: Tensor, non_loss_data: bool) -> Tensor:
                weighted = losses.double().flatten() * mask.double().flatten()
                return torch.stack([weighted.sum(), mask.double().sum()])

            return pl_module.config.forward_step_fn(model, microbatch), sums

        for chunk in chunks:
            chunk.eval()
        with torch.no_grad(), unchanged_random_state(device):
            outputs = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[None] * len(chunks) if len(chunks) > 1 else None,
                model=chunks,
                num_microbatches=1,
                seq_length=self._run.config.data.sequence_length,
                micro_batch_size=self._run.config.training.micro_batch_size,
                forward_only=True,
                collect_non_loss_data=True,
            )
        for chunk in chunks:
            chunk.train()
        total = torch.zeros(2, dtype=torch.float64, device=device)
        if outputs and parallel_state.is_pipeline_last_stage():
            total += outputs[-1]
        torch.distributed.all_reduce(total)
        return (total[0] / total[1]).item()
