"""Megatron's GPT dataset with an order of samples that no setting of the run's length can change."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from torch import Tensor

from pretrainkit.data.token_documents import PackedDocuments, ShardDocuments, is_token_folder, open_token_folder

Documents: TypeAlias = IndexedDataset | ShardDocuments | PackedDocuments

NO_PADDING = -1
"""An id that no token has."""


class EpochDataset(GPTDataset):
    """Samples of `sequence_length` tokens, epoch after epoch, each epoch in an order of its own.

    Megatron shuffles all epochs of a run as one, so a run that is extended into another epoch sees other
    data from its first step on. Here sample i is the (i mod n)-th of epoch i // n, where n samples make an
    epoch; the first epoch is Megatron's, later ones are permutations of it that depend on the seed and the
    epoch alone.

    Megatron also takes a token that equals the tokenizer's padding for padding, and where a model pads with
    its EOD (SmolLM2, Llama 3 as many set it) no document's end is ever learnt. A .bin has no padding.
    """

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, None, index_split, config)
        self._pad_token_id = NO_PADDING
        self._samples_per_epoch = super().__len__()
        self._length = self._samples_per_epoch if num_samples is None else num_samples
        self._permuted_epoch, self._permutation = 0, np.arange(0)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Documents:
        """The documents at a path: a .bin/.idx pair, token shards or a packed set."""
        if is_token_folder(dataset_path):
            return open_token_folder(dataset_path)
        return GPTDataset.build_low_level_dataset(dataset_path, config)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        return super().__getitem__(None if idx is None else self._within_first_epoch(int(idx)))

    def _within_first_epoch(self, index: int) -> int:
        epoch, position = divmod(index, self._samples_per_epoch)
        if epoch == 0:
            return position
        if epoch != self._permuted_epoch:
            generator = np.random.Generator(np.random.PCG64([self.config.random_seed, epoch]))
            self._permutation = generator.permutation(self._samples_per_epoch)
            self._permuted_epoch = epoch
        return int(self._permutation[position])

    def sample_documents(self, index: int) -> list[int]:
        """The numbers, in the .bin, of the documents that sample `index` is made of."""
        _, documents = self._query_document_sample_shuffle_indices(self._within_first_epoch(index))
        return [int(document) for document in documents]


def documents_of_samples(dataset: EpochDataset | BlendedDataset, samples: range) -> dict[str, list[int]]:
    """Per .bin/.idx prefix, the numbers of the documents that some samples of a run are made of."""
    documents: dict[str, set[int]] = {}
    for sample in samples:
        part, index = dataset, sample
        if isinstance(dataset, BlendedDataset):
            part, index = dataset.datasets[dataset.dataset_index[sample]], int(dataset.dataset_sample_index[sample])
        documents.setdefault(str(part.dataset_path), set()).update(part.sample_documents(index))
    return {prefix: sorted(numbers) for prefix, numbers in documents.items()}
