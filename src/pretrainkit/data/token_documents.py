"""Token shards and packed sets seen as documents, with the part of Megatron's IndexedDataset that training uses.

So all that follows (split, order of samples, one epoch, resume) is the same as for a .bin/.idx pair, and the same
documents give the same training whatever form they lie in.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pretrainkit.data.indexed.manifest import TokenizerRecord
from pretrainkit.data.packed.format import PackedDataset, is_packed_folder
from pretrainkit.data.shards.shard_set import ShardReader, is_shard_folder, open_shards
from pretrainkit.data.shards.urls import names_shards
from pretrainkit.errors import RequestError
from pretrainkit.files import sha256_file

KEPT_SAMPLES = 256
"""Decoded samples of shards that are kept: a long one is asked for several times."""
DOCUMENTS = "documents.npy"
"""In a packed set made by `concat`: lengths of the documents in its stream."""


def is_token_folder(path: Path | str) -> bool:
    """Whether a path means token shards (a folder, or their names) or a packed set."""
    return names_shards(path) or is_packed_folder(path) or is_shard_folder(path)


def open_token_folder(path: Path | str) -> ShardDocuments | PackedDocuments | PackedRows:
    """What is there. Raises RequestError when it is incomplete or damaged."""
    if names_shards(path) or not is_packed_folder(path):
        return ShardDocuments(str(path))
    packed = PackedDataset(path)
    return PackedDocuments(packed) if packed.manifest.packing == "concat" else PackedRows(packed)


class ShardDocuments:
    """Every sample of a set of shards is a document, in the order of the shards."""

    def __init__(self, shards: str) -> None:
        self.path_prefix = shards
        self._set = open_shards(shards)
        if not self._set.num_samples:
            raise RequestError("no sample in any shard", where=shards)
        self._reader = ShardReader(self._set.shards)
        tables = [shard.table["num_tokens"] for shard in self._set.shards]
        self.sequence_lengths: NDArray[np.int32] = np.concatenate(tables).astype(np.int32)
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum([len(table) for table in tables])])
        self._kept: OrderedDict[int, NDArray[np.int32]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def tokenizer(self) -> TokenizerRecord:
        """Which tokenizer gave the ids."""
        return self._set.records[0].tokenizer

    @property
    def data_hash(self) -> str:
        """Changes when the content does, not its place."""
        return self._set.data_hash

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[np.int32]:
        """Ids of a document from `offset` on, `length` of them or all that follow."""
        number = int(idx)
        ids = self._kept.get(number)
        if ids is None:
            shard = int(np.searchsorted(self._first, number, side="right")) - 1
            ids = self._kept[number] = self._reader.read(shard, number - int(self._first[shard]))
            if len(self._kept) > KEPT_SAMPLES:
                self._kept.popitem(last=False)
        return ids[offset : None if length is None else offset + length]


class PackedDocuments:
    """The documents of the stream that a `concat` set was cut from."""

    def __init__(self, packed: PackedDataset) -> None:
        self._set = packed
        self.path_prefix = str(packed.folder)
        path = packed.folder / DOCUMENTS
        try:
            self.sequence_lengths: NDArray[np.int32] = np.load(path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise RequestError(f"not readable: {error}", where=str(path)) from error
        self._begins = np.cumsum(self.sequence_lengths, dtype=np.int64) - self.sequence_lengths
        if int(self.sequence_lengths.sum(dtype=np.int64)) != self._set.manifest.num_tokens:
            raise RequestError("its documents are not those of the sequences", where=str(path))

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def tokenizer(self) -> TokenizerRecord:
        """Which tokenizer gave the ids."""
        return self._set.manifest.tokenizer

    @property
    def data_hash(self) -> str:
        """Changes when the content does, not its place."""
        content = [entry.xxh3_128 for entry in self._set.manifest.files] + [sha256_file(self._set.folder / DOCUMENTS)]
        return hashlib.sha256(" ".join(content).encode()).hexdigest()

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[np.int32]:
        """Ids of a document from `offset` on, `length` of them or all that follow."""
        count = int(self.sequence_lengths[idx]) - int(offset)
        if length is not None:
            count = min(count, int(length))
        return self._set.tokens(int(self._begins[idx]) + int(offset), count)


class PackedRows:
    """The rows of a set packed by `bestfit`: each is a sample, split and counted like a document."""

    def __init__(self, packed: PackedDataset) -> None:
        self._set = packed
        self.path_prefix = str(packed.folder)
        self.row_length = packed.manifest.sequence_length
        self.sequence_lengths: NDArray[np.int32] = np.full(len(packed), self.row_length, np.int32)

    def __len__(self) -> int:
        return len(self._set)

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return self._set.manifest.num_tokens

    @property
    def tokenizer(self) -> TokenizerRecord:
        """Which tokenizer gave the ids."""
        return self._set.manifest.tokenizer

    @property
    def data_hash(self) -> str:
        """Changes when the content does, not its place."""
        content = [entry.xxh3_128 for entry in self._set.manifest.files]
        return hashlib.sha256(" ".join(["rows", *content]).encode()).hexdigest()

    def row(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The ids [row_length] of a row, and the lengths of the documents in it; padding follows them."""
        return self._set.input_ids(number), self._set.document_lengths(number)
