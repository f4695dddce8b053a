"""Splits and samples are counted as megatron-core counts them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from indexed_writer import IndexedDatasetWriter

from pretrainkit.config.split import num_samples, parse_split, split_bounds
from pretrainkit.data.dataset import read_dataset

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("megatron")]


def test_bounds_equal_megatrons_for_any_split_and_size() -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    chance = random.Random(1)
    for _ in range(3000):
        split = ",".join(str(chance.choice([0, 1, 2, 0.5, 30, 969, chance.random()])) for _ in range(3))
        if float(split.split(",")[0]) == 0:
            continue
        size = chance.choice([0, 1, 2, 5, 10, 999, 1000, chance.randrange(10**9)])
        bounds = split_bounds(parse_split(split), size)
        matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
        for part, edges in enumerate(matrix):
            if edges is None:
                assert bounds[part] == bounds[part + 1], (split, size)
            else:
                expected = tuple(int(round(edge * float(size))) for edge in edges)  # noqa: RUF046
                assert (bounds[part], bounds[part + 1]) == expected, (split, size)


@pytest.mark.parametrize("split", ["8,2,0", "969,30,1", "1,1,1"])
def test_samples_of_one_epoch_equal_megatrons(tmp_path: Path, split: str) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        eod = pad = 0
        vocab_size = 100
        unique_identifiers: dict[str, str] = {}  # noqa: RUF012

    chance = np.random.default_rng(1)
    with IndexedDatasetWriter(tmp_path / "a", np.dtype(np.uint16)) as writer:
        for _ in range(2000):
            writer.add_document(chance.integers(0, 100, chance.integers(1, 60)))
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        blend=([str(tmp_path / "a")], None),
        split=split,
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    datasets = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()
    tokens = read_dataset(str(tmp_path / "a"), split).split_tokens
    assert tokens
    # Megatron pads a last, incomplete validation sample; training, which an epoch is counted by, drops it.
    assert num_samples(tokens[0][0], 16) == len(datasets[0])
    for part, dataset in enumerate(datasets):
        assert (dataset is None and tokens[0][part] == 0) or tokens[0][part] == sum(
            dataset.dataset.sequence_lengths[dataset.indices]
        )
