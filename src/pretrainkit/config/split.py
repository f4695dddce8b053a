"""How a dataset is divided into training, validation and test documents, as megatron-core does it.

Must agree with `parse_and_normalize_split`, `convert_split_vector_to_split_matrix` and
`BlendedMegatronDatasetBuilder._build_megatron_dataset_splits` of megatron.core.datasets.
"""

from __future__ import annotations

import itertools
import math

from pretrainkit.errors import RequestError

SPLIT_NAMES = ("training", "validation", "test")


def parse_split(split: str) -> tuple[float, float, float]:
    """The three shares of a split like '969,30,1', normalised to a sum of 1.

    Raises RequestError unless there are three numbers >= 0 and the first is positive.
    """
    where, needed = "--split", "three numbers, for training, validation and test, such as 969,30,1"
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        raise RequestError(f"{split!r}", needed=needed, where=where) from None
    if len(shares) != len(SPLIT_NAMES):
        raise RequestError(f"{len(shares)} shares in {split!r}", needed=needed, where=where)
    if any(share < 0 or not math.isfinite(share) for share in shares) or shares[0] == 0:
        raise RequestError(f"{split!r}", needed="shares >= 0, and some for training", where=where)
    total = sum(shares)
    return (shares[0] / total, shares[1] / total, shares[2] / total)


def split_bounds(shares: tuple[float, float, float], num_sequences: int) -> tuple[int, int, int, int]:
    """Borders b of the splits: split i holds the sequences [b[i], b[i + 1]) of a file with `num_sequences`."""
    edges = itertools.accumulate(shares, initial=0.0)
    first, second, third, last = (round(edge * float(num_sequences)) for edge in edges)
    return (first, second, third, last)


def num_samples(num_tokens: int, sequence_length: int) -> int:
    """Samples in one pass over `num_tokens`: each reads one token beyond its own, and none is used twice."""
    return max(0, (num_tokens - 1) // sequence_length)
