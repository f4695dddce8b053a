"""Losses by label of documents (`data.indexed.labels`) of training steps; of an evaluation by source and position, too.

They are summed with the loss, and read where the device is waited for anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from numpy.typing import NDArray
from torch import Tensor

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.data.indexed.labels import label_code
from pretrainkit.engine.nemo import MaskedTokenLossReduction
from pretrainkit.megatron.dataset import TARGET_LABELS
from pretrainkit.megatron.held_out import SOURCE
from pretrainkit.run.held_out import position_ranges

OTHER = "other"
"""Documents of data that was at URLs when the run was planned."""


class LossByLabel:
    """Sums of the loss, and numbers of tokens, for each label, source and position, since they were last taken."""

    def __init__(
        self, labels: Sequence[str], accelerator: str, *, num_sources: int = 1, positions: Sequence[int] = (0,)
    ) -> None:
        """`positions`: where the ranges of positions begin that have sums of their own."""
        by_code = {label_code(label): label for label in labels}
        codes = sorted(by_code)
        self.names = [*(by_code[code] for code in codes), OTHER]
        self._sorted_codes = codes
        self._device = "cuda" if accelerator == "gpu" else "cpu"
        self._positions = torch.tensor(positions)
        self._shape = num_sources, len(self.names), len(positions)
        self._taken = torch.zeros(2, math.prod(self._shape), dtype=torch.float64)
        """The same of all ranks, for the steps since the last record."""

    @cached_property
    def _sums(self) -> Tensor:
        """[2, sources x labels x positions]: losses in nats and tokens of this rank since the last step, once its
        device is chosen."""
        return torch.zeros_like(self._taken, device=self._device)

    @cached_property
    def _codes(self) -> Tensor:
        return torch.tensor(self._sorted_codes, device=self._device)

    def numbers(self, batch: dict[str, Tensor]) -> Tensor:
        """For each target [batch, sequence] of a microbatch the number of its sum; on the device, since on the CPU it
        takes as long as several layers' launches.
        """
        codes = batch[TARGET_LABELS].to(self._device, non_blocking=True)
        if self._sorted_codes:
            numbers = torch.searchsorted(self._codes, codes).clamp(max=len(self._sorted_codes) - 1)
            numbers = torch.where(self._codes[numbers] == codes, numbers, len(self._sorted_codes))
        else:
            numbers = torch.zeros_like(codes)
        if SOURCE in batch:
            numbers += len(self.names) * batch[SOURCE].to(self._device, non_blocking=True)[:, None]
        if len(self._positions) > 1:
            places = torch.bucketize(batch["position_ids"], self._positions, right=True) - 1
            numbers = numbers * len(self._positions) + places.to(self._device, non_blocking=True)
        return numbers

    def add(self, losses: Tensor, mask: Tensor, numbers: Tensor) -> None:
        """Add the losses [batch, sequence] of a microbatch."""
        weights = mask.flatten().double()
        values = torch.stack([losses.detach().flatten().double() * weights, weights])
        self._sums.index_add_(1, numbers.flatten(), values)

    def finish_step(self) -> None:
        """Add up the step's sums of all ranks, on all ranks. To be called where the device is waited for anyway."""
        torch.distributed.all_reduce(self._sums)
        self._taken += self._sums.cpu()
        self._sums.zero_()

    def take_sums(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Losses in nats and numbers of tokens [sources, labels, positions] since the last call."""
        # Each of these ranks has added its own; a power of two, so that nothing is rounded.
        losses, tokens = self._taken.view(2, *self._shape) / parallel_state.get_tensor_model_parallel_world_size()
        self._taken = torch.zeros_like(self._taken)
        return losses.numpy(), tokens.numpy().round()

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Mean loss in nats, and number of tokens, of each label that occurred since the last call."""
        losses, tokens = (sums.sum((0, 2)).tolist() for sums in self.take_sums())
        found = [each for each in zip(self.names, losses, tokens, strict=True) if each[2]]
        return {name: loss / count for name, loss, count in found}, {name: int(count) for name, _, count in found}


def held_out_losses(run: ResolvedRun) -> LossByLabel:
    """The sums of an evaluation: its sources are the prefixes of the run's dataset, then the validation sets."""
    labels = {*run.dataset.labels, *(label for each in run.validation_sets for label in each.dataset.labels)}
    sources = len(run.dataset.prefixes) + len(run.validation_sets)
    positions = position_ranges(run.config.data.sequence_length)
    return LossByLabel(sorted(labels), run.accelerator, num_sources=sources, positions=positions)


def labelled(step: Callable[..., Any], training: LossByLabel | None, held_out: LossByLabel) -> Callable[..., Any]:
    """Megatron's data step; on the last pipeline stage its microbatches have the number of each target's sum."""

    def labelled_step(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        batch = next(batches)
        output = step(iter([batch]), *args, **kwargs)
        by_label = training if torch.is_grad_enabled() else held_out
        if by_label and parallel_state.is_pipeline_last_stage():
            numbers = by_label.numbers(batch[0] if isinstance(batch, tuple) else batch)
            output[TARGET_LABELS] = get_batch_on_this_cp_rank({TARGET_LABELS: numbers})[TARGET_LABELS]
        return output

    return labelled_step


class LabelledLossReduction(MaskedTokenLossReduction):
    """NeMo's loss of a step, added up by label as well."""

    def __init__(self, by_label: LossByLabel, *, validation_step: bool = False) -> None:
        super().__init__(validation_step=validation_step)
        self._by_label = by_label

    def forward(self, batch: dict[str, Tensor], forward_out: Tensor) -> Any:
        """As NeMo's."""
        self._by_label.add(forward_out, batch["loss_mask"], batch[TARGET_LABELS])
        return super().forward(batch, forward_out)
