"""The samples of an evaluation: those of the validation split, then those of the sets of --valid_path."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from torch import Tensor

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.megatron.dataset import EpochDataset

SOURCE = "source"
"""In a sample of an evaluation: the number of its prefix in the run's dataset or, after those, that of its set."""
_SEED = 0
"""Of a set's order of samples: the same for all runs, so that all of one sequence length evaluate the same samples."""


class HeldOutSamples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples of several datasets, one dataset after the other, as complete batches; the last one is padded."""

    def __init__(self, run: ResolvedRun, own: Any, sets: Sequence[Any]) -> None:
        """`own` is Megatron's dataset of the validation split, None where it is empty; `sets` are those of the run."""
        training, num_prefixes = run.config.training, len(run.dataset.prefixes)
        own_count = training.val_steps * training.global_batch_size if run.has_validation_split else 0
        self._datasets = [own, *sets]
        self._first_sources = [0, *(num_prefixes + number for number in range(len(sets)))]
        self._begins = [*itertools.accumulate((each.num_samples for each in run.validation_sets), initial=own_count)]
        self._length = run.evaluation_steps * training.global_batch_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        is_padding = idx >= self._begins[-1]
        index = self._begins[-1] - 1 if is_padding else int(idx)
        number = bisect.bisect_right(self._begins[:-1], index)
        sample = dict(self._datasets[number][index - (self._begins[number - 1] if number else 0)])
        part = int(sample.pop("dataset_id", 0))  # of a blend
        sample[SOURCE] = torch.tensor(self._first_sources[number] + (0 if number else part))
        if is_padding:
            sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])
        return sample


def build_sets(
    run: ResolvedRun, prefixes: Sequence[tuple[str, ...]], config: GPTDatasetConfig, index: Path
) -> list[Any]:
    """Megatron's datasets for the run's validation sets, whose files are at `prefixes`; one pass over each.

    `index` is the folder of the run's indexes.

    To be called on all ranks: the first builds the indexes.
    """
    sets = []
    for each, paths in zip(run.validation_sets, prefixes, strict=True):
        settings = replace(
            config,
            random_seed=_SEED,
            blend=([*paths], None),
            split="0,1,0",
            path_to_cache=str(index / each.dataset.data_hash[:16]),
        )
        sets.append(BlendedMegatronDatasetBuilder(EpochDataset, [0, None, 0], lambda: True, settings).build()[1])
    return sets
