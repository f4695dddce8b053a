"""The order in which Megatron draws the samples of a blend from its datasets, with weights that may change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.utils import normalize
from numpy.typing import NDArray

from pretrainkit.config.blend_schedule import BlendSegment


def shares_drawn(dataset: BlendedDataset, samples: range) -> list[float]:
    """The shares of some samples of a run that a blend draws from its datasets, in their order."""
    parts = dataset.dataset_index[samples.start : samples.stop]
    return [int(count) / len(samples) for count in np.bincount(parts, minlength=len(dataset.datasets))]


def apply_schedule(dataset: BlendedDataset, segments: Sequence[BlendSegment]) -> None:
    """Draw the samples of each segment with its weights; every dataset goes on with the sample after its last.

    So a sample depends on the segments up to its own alone, and those of a first segment with the weights that Megatron
    has built the blend with are the same.
    """
    dataset.dataset_index, dataset.dataset_sample_index = scheduled_indices(segments, len(dataset))


def scheduled_indices(segments: Sequence[BlendSegment], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """For each of `size` samples the number of its dataset, and of the sample within that (BlendedDataset's arrays)."""
    drawn = np.zeros(len(segments[0].weights), dtype=np.int64)
    numbers, places = [], []
    begins = [min(segment.first_sample, size) for segment in segments]
    for segment, (begin, end) in zip(segments, itertools.pairwise([*begins, size]), strict=True):
        # Megatron would draw from a dataset of weight 0 where all others have their shares.
        used = np.flatnonzero(segment.weights)
        # Twice, as Megatron does: weights that differ in their last bit give another order.
        weights = normalize(normalize([segment.weights[number] for number in used]))
        parts, place = np.zeros(end - begin, np.int16), np.zeros(end - begin, np.int64)
        helpers.build_blending_indices(parts, place, weights, len(used), end - begin, False)
        number = used[parts].astype(np.int16)
        numbers.append(number)
        places.append(place + drawn[number])
        drawn += np.bincount(number, minlength=len(drawn))
    return np.concatenate(numbers), np.concatenate(places)
