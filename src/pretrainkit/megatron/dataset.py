"""Megatron's GPT dataset, in an order of samples that no setting of the run's length can change; its index files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from numpy.typing import NDArray
from torch import Tensor

from pretrainkit import files
from pretrainkit.config.schema import DatasetFacts, ResolvedRun
from pretrainkit.data.documents import document_labels, documents_kind
from pretrainkit.data.packed.format import PackedDocuments
from pretrainkit.data.shards.mirror import local_shards
from pretrainkit.data.shards.shard_set import ShardDocuments
from pretrainkit.errors import DataError
from pretrainkit.logs import get_logger

Documents: TypeAlias = IndexedDataset | ShardDocuments | PackedDocuments

LOGGER = get_logger(__name__)
NO_PADDING = -1
"""Not the id of any token."""
INDEX_KINDS = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
"""Files that megatron-core caches for a dataset."""
TARGET_LABELS = "target_labels"
"""In a sample, the labels of the documents of the tokens to predict."""
INDEX_WAIT_S = 120.0
"""A new file is visible to other nodes of a shared disk within a minute (NFS's acdirmax)."""


class EpochDataset(GPTDataset):
    """Samples of `sequence_length` tokens, epoch after epoch, each epoch in another order.

    Megatron shuffles all epochs of a run together, so a run that is extended into another epoch would see other data
    from its first step on. Here sample i is the (i mod n)-th of epoch i // n for n samples per epoch. The first epoch
    is Megatron's; later ones are permutations of it that depend only on the seed and the epoch.

    Megatron treats a token that equals the tokenizer's padding token as padding. For models that pad with their EOD
    (SmolLM2, and Llama 3 in many setups) the end of a document would never be learned. A .bin has no padding.

    With `eod_mask_loss` Megatron masks the loss of the token after the tokenizer's EOD, which may not be the token that
    ends the data's documents (--eod-token). Here the loss of the token after a document's end is masked in any case.

    With `reset_attention_mask` position ids are reset at the true document boundaries, not after tokens that equal EOD,
    and the loss of the token after a boundary is masked. Datasets packed by bestfit have one row per sample and are
    always read in this way.
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
        self._samples_per_epoch = len(self.document_index) if self._rows else super().__len__()
        self._length = self._samples_per_epoch if num_samples is None else num_samples
        self._permuted_epoch, self._permutation = 0, np.arange(0)
        self._labels = document_labels(dataset_path or "", config.blend[0] if config.blend else ())

    @property
    def _rows(self) -> PackedDocuments | None:
        """The dataset, where its rows are the samples."""
        packed = self.dataset if isinstance(self.dataset, PackedDocuments) else None
        return packed if packed and packed.row_length else None

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Documents:
        """The documents at a path: a .bin/.idx pair, token shards or a packed dataset."""
        kind = documents_kind(dataset_path)
        return kind(dataset_path) if kind else GPTDataset.build_low_level_dataset(dataset_path, config)

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, ...]:
        folder = Path(self.config.path_to_cache)
        name = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
        if is_first:  # the others begin once it has built everything
            remove_damaged_indexes(folder, name)
        if not self._rows:
            if not is_first:
                wait_until_seen(folder, name)
            return super()._build_document_sample_shuffle_indices()
        order = np.random.RandomState(self.config.random_seed).permutation(self.indices)
        return order, None, None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        position = 0 if idx is None else self._within_first_epoch(int(idx))
        if self._rows:
            row = self.document_index[position]
            sample = row_sample(*self._rows.row(int(row)))
            documents, ends = np.array([row]), np.array([len(sample["tokens"])])
        else:
            sample = super().__getitem__(position)
            documents, ends = self._documents(position)
            if self.config.reset_attention_mask:
                reset_positions(sample, ends)
            elif self.config.eod_mask_loss:
                mask_boundary_loss(sample, ends)
        sample[TARGET_LABELS] = target_labels(self._labels.codes(documents), ends, len(sample["tokens"]))
        if idx is None:  # pads a batch
            sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])
        return sample

    def _within_first_epoch(self, index: int) -> int:
        epoch, position = divmod(index, self._samples_per_epoch)
        if epoch == 0:
            return position
        if epoch != self._permuted_epoch:
            generator = np.random.Generator(np.random.PCG64([self.config.random_seed, epoch]))
            self._permutation = generator.permutation(self._samples_per_epoch)
            self._permuted_epoch = epoch
        return int(self._permutation[position])

    def _documents(self, position: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The documents in a sample of the first epoch, and the positions in it that follow their last tokens."""
        index = int(self.shuffle_index[position])
        (first, offset), (last, _) = self.sample_index[index], self.sample_index[index + 1]
        documents = self.document_index[int(first) : int(last) + 1].astype(np.int64)
        return documents, np.cumsum(self.dataset.sequence_lengths[documents], dtype=np.int64) - int(offset)

    def sample_documents(self, index: int) -> list[int]:
        """The numbers of the documents in sample `index`, or of its row in a dataset packed by bestfit."""
        position = self._within_first_epoch(index)
        if self._rows:
            return [int(self.document_index[position])]
        _, documents = self._query_document_sample_shuffle_indices(position)
        return [int(document) for document in documents]


def target_labels(codes: NDArray[np.int64], ends: NDArray[np.int64], length: int) -> Tensor:
    """For each position of a sample [S], the code of the label of the document whose token is predicted there."""
    documents = np.searchsorted(ends, np.arange(1, length + 1), side="right")
    return torch.from_numpy(codes[np.minimum(documents, len(codes) - 1)])


def reset_positions(sample: dict[str, Tensor], ends: NDArray[np.int64]) -> None:
    """Reset position ids [S] where a document ends, and mask the loss of the token after the boundary."""
    length = sample["tokens"].numel()
    begins = np.zeros(length, np.int64)
    inner = ends[(ends > 0) & (ends < length)]
    begins[inner] = inner
    sample["position_ids"] = torch.from_numpy(np.arange(length) - np.maximum.accumulate(begins))
    mask_boundary_loss(sample, ends)


def mask_boundary_loss(sample: dict[str, Tensor], ends: NDArray[np.int64]) -> None:
    """Mask the loss [S] of tokens that follow a document's end."""
    ends = ends[(ends > 0) & (ends <= sample["tokens"].numel())]
    sample["loss_mask"][torch.from_numpy(ends - 1)] = 0.0


def row_sample(ids: NDArray[np.int32], document_lengths: NDArray[np.int32]) -> dict[str, Tensor]:
    """The sample of a row [S] of full documents; their lengths don't include the padding at the end of the row."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    ends = np.cumsum(document_lengths, dtype=np.int64)
    sample = {"tokens": tokens, "labels": tokens.roll(-1), "loss_mask": torch.ones(len(ids))}
    reset_positions(sample, ends)
    sample["loss_mask"][int(ends[-1]) if len(ends) else 0 :] = 0.0
    return sample


def local_prefixes(run: ResolvedRun, dataset: DatasetFacts) -> tuple[str, ...]:
    """Paths on disk of a dataset of a run; shards at URLs are downloaded first, once per file system.

    Called before process groups are created: a download may take longer than their timeouts.
    """
    folder = run.config.data.shard_cache or str(Path(run.experiment_dir).parent / ".shard_cache")
    cache = Path(os.path.expandvars(folder)).expanduser()
    return tuple(local_shards(prefix, cache) for prefix in dataset.prefixes)


def documents_of_samples(dataset: EpochDataset | BlendedDataset, samples: Iterable[int]) -> dict[str, list[int]]:
    """The numbers of the documents in some samples of a run, by .bin/.idx prefix."""
    documents: dict[str, set[int]] = {}
    for sample in samples:
        part, index = dataset, sample
        if isinstance(dataset, BlendedDataset):
            part, index = dataset.datasets[dataset.dataset_index[sample]], int(dataset.dataset_sample_index[sample])
        documents.setdefault(str(part.dataset_path), set()).update(part.sample_documents(index))
    return {prefix: sorted(numbers) for prefix, numbers in documents.items()}


def saving_atomically(save: Callable[..., None]) -> Callable[..., None]:
    """`numpy.save` that writes under a temporary name and renames.

    megatron-core saves its indexes with it under their final names, and at the next start treats any file of that name
    as complete: after a kill, or while another job builds the same index, it would read part of a file.
    """

    def save_atomically(file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            save(file, *args, **kwargs)
            return
        name = os.fspath(file)
        with (
            files.atomic_file(Path(name if name.endswith(".npy") else f"{name}.npy")) as temporary,
            temporary.open("wb") as out,
        ):
            save(out, *args, **kwargs)

    return save_atomically


def remove_damaged_indexes(folder: Path, name: str) -> None:
    """Remove the cached index files of a dataset, or of a blend, that are cut: megatron-core then builds them.

    It takes any file of the right name as complete. A full disk, a quota or a copy may have cut one.
    """
    for path in (*folder.glob(f"{name}-*.npy"), *folder.glob("*-BlendedDataset-*.npy")):
        try:
            np.load(path, mmap_mode="r")
        except (ValueError, EOFError, OSError) as error:
            LOGGER.warning("%s is cut or damaged (%s) and is built again", path, error)
            path.unlink(missing_ok=True)


def wait_until_seen(folder: Path, name: str, limit_s: float = INDEX_WAIT_S) -> None:
    """Wait until a dataset's index files `<folder>/<name>-*`, which the first rank has written, are visible here.

    Raises DataError if they aren't in time.
    """
    end = time.monotonic() + limit_s
    while missing := [kind for kind in INDEX_KINDS if not (folder / f"{name}-{kind}").is_file()]:
        if time.monotonic() > end:
            raise DataError(
                f"{name}-{missing[0]} is not seen here, {limit_s:.0f} s after the first rank wrote it",
                where=str(folder),
                needed="a folder of experiments on a disk that all nodes share",
            )
        time.sleep(0.1)
        if folder.is_dir():
            next(folder.iterdir(), None)  # makes NFS ask its server again
