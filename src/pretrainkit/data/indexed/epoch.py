"""What one pass over prepared datasets is: samples and steps at a sequence length and global batch size."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrainkit.config.split import SPLIT_NAMES, num_samples, parse_split, split_bounds
from pretrainkit.data.indexed.format import IndexedDataset
from pretrainkit.errors import RequestError


@dataclass(frozen=True)
class Epoch:
    """One split of one or several datasets; samples don't cross from one dataset to the next."""

    split: str
    num_documents: int
    num_tokens: int
    num_samples: int
    num_steps: int
    """Whole batches."""


def count_epoch(prefixes: list[Path], split: str, sequence_length: int, global_batch_size: int) -> list[Epoch]:
    """Documents, tokens, samples and steps of each split with a share.

    Raises RequestError when a split that is wanted gets less than one sample: training on it would not start.
    """
    shares = parse_split(split)
    documents, tokens, samples = ([0] * len(SPLIT_NAMES) for _ in range(3))
    for prefix in prefixes:
        lengths = IndexedDataset(prefix).sequence_lengths
        for i, (begin, end) in enumerate(itertools.pairwise(split_bounds(shares, len(lengths)))):
            found = int(lengths[begin:end].sum(dtype=np.int64))
            documents[i], tokens[i] = documents[i] + end - begin, tokens[i] + found
            samples[i] += num_samples(found, sequence_length)
    for name, share, found, count in zip(SPLIT_NAMES, shares, tokens, samples, strict=True):
        if share and not count:
            raise RequestError(
                f"the {name} split of {split} has {found} tokens",
                where="--split",
                needed=f"at least {sequence_length + 1}: one sample of {sequence_length} and the token after it",
                action=f"give the {name} split a larger share, or none",
            )
    return [
        Epoch(name, documents[i], tokens[i], samples[i], samples[i] // global_batch_size)
        for i, name in enumerate(SPLIT_NAMES)
        if shares[i]
    ]
