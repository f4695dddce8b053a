"""The training loss by label of documents (`data.indexed.labels`): summed with the loss, read when the norm is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

from pretrainkit.data.indexed.labels import label_code
from pretrainkit.engine.nemo import MaskedTokenLossReduction
from pretrainkit.megatron.dataset import TARGET_LABELS

OTHER = "other"
"""Documents of data that was at URLs when the run was planned."""


class LossByLabel:
    """Sums of the loss, and numbers of tokens, for each label since they were last taken."""

    def __init__(self, labels: Sequence[str], accelerator: str) -> None:
        by_code = {label_code(label): label for label in labels}
        codes = sorted(by_code)
        self._names = [*(by_code[code] for code in codes), OTHER]
        self._sorted_codes = codes
        self._device = "cuda" if accelerator == "gpu" else "cpu"
        self._taken = torch.zeros(2, len(self._names), dtype=torch.float64)
        """The same of all ranks, for the steps since the last record."""

    @cached_property
    def _sums(self) -> Tensor:
        """[2, labels + 1]: losses in nats and tokens of the current step on this rank, once its device is chosen."""
        return torch.zeros_like(self._taken, device=self._device)

    @cached_property
    def _codes(self) -> Tensor:
        return torch.tensor(self._sorted_codes, device=self._device)

    def data_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's data step; on the last pipeline stage its microbatches have the number of each target's label."""

        def labelled_step(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
            batch = next(batches)
            codes = (batch[0] if isinstance(batch, tuple) else batch)[TARGET_LABELS]
            output = step(iter([batch]), *args, **kwargs)
            if parallel_state.is_pipeline_last_stage():
                # On the device: on the CPU it takes as long as several layers' launches.
                numbers = self._numbers(codes.to(self._device, non_blocking=True))
                output[TARGET_LABELS] = get_batch_on_this_cp_rank({TARGET_LABELS: numbers})[TARGET_LABELS]
            return output

        return labelled_step

    def _numbers(self, codes: Tensor) -> Tensor:
        """Positions in the list of names."""
        numbers = torch.searchsorted(self._codes, codes).clamp(max=len(self._codes) - 1)
        return torch.where(self._codes[numbers] == codes, numbers, len(self._codes))

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

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Mean loss in nats, and number of tokens, of each label that occurred since the last call."""
        losses, tokens = self._taken.tolist()
        self._taken.zero_()
        copies = parallel_state.get_tensor_model_parallel_world_size()  # each of these ranks has counted its own
        found = [(name, *sums) for name, *sums in zip(self._names, losses, tokens, strict=True) if sums[1]]
        means = {name: loss / count for name, loss, count in found}
        return means, {name: round(count / copies) for name, _, count in found}


class LabelledLossReduction(MaskedTokenLossReduction):
    """NeMo's loss of a training step, added up by label as well."""

    def __init__(self, by_label: LossByLabel) -> None:
        super().__init__()
        self._by_label = by_label

    def forward(self, batch: dict[str, Tensor], forward_out: Tensor) -> Any:
        """As NeMo's."""
        self._by_label.add(forward_out, batch["loss_mask"], batch[TARGET_LABELS])
        return super().forward(batch, forward_out)
