"""One rank's batches in an epoch over token shards, each found by its number."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from pretrainkit.data.shards.order import EpochOrder, Part, first_row, shard_order
from pretrainkit.data.shards.shard_set import ShardReader, ShardSet
from pretrainkit.errors import RequestError

IGNORED_LABEL = -100
"""Label that Hugging Face models leave out of the loss."""
LANES = 8
"""Ranges that a rank's batches are dealt from: enough for eight workers that read different shards."""
KEPT_SAMPLES = 64
"""Decoded samples that are cached: the rest of a sample may be in the next row."""


class TokenBatches(Dataset[dict[str, torch.Tensor]]):
    """The batches of one rank, by number. `set_epoch` chooses the epoch."""

    def __init__(
        self,
        shards: ShardSet,
        *,
        sequence_length: int,
        batch_size: int,
        packing: str = "concat",
        pad_to_multiple: int = 8,
        rank: int = 0,
        world_size: int = 1,
        split: str = "tokens",
        shuffle_buffer: int = 10_000,
        shuffle_shards: bool = True,
        seed: int = 0,
        lanes: int = LANES,
    ) -> None:
        """See `make_loader`. Raises RequestError."""
        _check(sequence_length, batch_size, packing, split, rank, world_size, lanes)
        self._set, self._reader = shards, ShardReader(shards.shards)
        self.sequence_length, self.batch_size, self.packing = sequence_length, batch_size, packing
        self._multiple = max(1, pad_to_multiple)
        self._rank, self._world_size, self._split = rank, world_size, split
        self._buffer, self._shuffle, self._seed, self._lanes = shuffle_buffer, shuffle_shards, seed, lanes
        eod = shards.records[0].tokenizer.eod_id if shards.records else None
        self._padding_id = eod or 0  # its label is ignored, so it is never trained on
        self._kept: OrderedDict[tuple[int, int], NDArray[np.int32]] = OrderedDict()
        self._remote: dict[int, dict[int, NDArray[np.int32]]] = {}
        self.set_epoch(0)
        if not len(self):
            raise RequestError(
                f"{shards.num_tokens} tokens in {shards.num_samples} samples don't fill a batch on every rank",
                needed=f"{world_size} ranks x {batch_size} rows x {sequence_length} tokens",
                action="take a smaller batch, shorter rows or fewer ranks",
            )

    def identity(self) -> dict[str, Any]:
        """What must be equal for a state to mean the same place."""
        return {
            "data_hash": self._set.data_hash,
            "sequence_length": self.sequence_length,
            "batch_size": self.batch_size,
            "packing": self.packing,
            "world_size": self._world_size,
            "rank": self._rank,
            "split": self._split,
            "shuffle_buffer": self._buffer,
            "shuffle_shards": self._shuffle,
            "seed": self._seed,
            "lanes": self._lanes,
        }

    def set_epoch(self, epoch: int) -> None:
        """Switch to the order of an epoch."""
        self.epoch = epoch
        self._kept.clear()
        self._remote.clear()
        seed = (self._seed, epoch)
        order = shard_order(len(self._set.shards), shuffle=self._shuffle, seed=seed)
        self._first_row = 0
        if self._split == "shards":
            if len(order) < self._world_size:
                raise RequestError(
                    f"{len(order)} shards with samples for {self._world_size} ranks",
                    where="split='shards'",
                    needed="a shard for each rank",
                    action="use split='tokens', which gives every rank equal parts of all shards",
                )
            rows = [self._num_rows(order[rank :: self._world_size]) for rank in range(self._world_size)]
            self._num_batches = min(rows) // self.batch_size
            used, order = sum(rows), order[self._rank :: self._world_size]
        else:
            used = self._num_rows(order)
            self._num_batches = used // (self.batch_size * self._world_size)
            self._first_row = self._rank * self._num_batches * self.batch_size
        self.num_dropped_rows = used - self._num_batches * self.batch_size * self._world_size
        """Rows at the end of the epoch that don't fill a batch on every rank."""
        tables = [self._set.shards[number].table for number in order]
        self._order = EpochOrder(order, tables, self._weigh, shuffle_buffer=self._buffer, seed=seed)

    def _weigh(self, table: NDArray[Any]) -> NDArray[np.int64]:
        tokens = table["num_tokens"].astype(np.int64)
        return tokens if self.packing == "concat" else -(-tokens // self.sequence_length)

    @property
    def _weight_per_row(self) -> int:
        return self.sequence_length if self.packing == "concat" else 1

    def _num_rows(self, shards: list[int]) -> int:
        return sum(int(self._weigh(self._set.shards[number].table).sum()) for number in shards) // self._weight_per_row

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if not 0 <= number < self._num_batches:
            raise IndexError(number)
        first = self._first_row + first_row(number, self._num_batches, self.batch_size, self._lanes)
        rows = [self.row(row) for row in range(first, first + self.batch_size)]
        length = self.sequence_length
        if self.packing == "pad":
            length = min(length, -(-max(map(len, rows)) // self._multiple) * self._multiple)
        input_ids = np.full((self.batch_size, length), self._padding_id, np.int64)
        labels = np.full((self.batch_size, length), IGNORED_LABEL, np.int64)
        mask = np.zeros((self.batch_size, length), np.int64)
        for place, ids in enumerate(rows):
            input_ids[place, : len(ids)] = labels[place, : len(ids)] = ids
            mask[place, : len(ids)] = 1
        arrays = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def row(self, row: int) -> NDArray[np.int32]:
        """The ids of a row of this rank's shards, without padding."""
        unit = self._weight_per_row
        parts = []
        for part in self._order.parts(row * unit, (row + 1) * unit):
            ids = self._ids(part)
            if self.packing == "concat":
                parts.append(ids[part.begin : part.end])
            else:
                parts.append(ids[part.begin * self.sequence_length : part.end * self.sequence_length])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _ids(self, part: Part) -> NDArray[np.int32]:
        if not self._reader.is_local(part.shard):
            return self._remote_window(part.window)[part.place]
        key = (part.shard, part.sample)
        if key not in self._kept:
            self._kept[key] = self._reader.read(*key)
            if len(self._kept) > KEPT_SAMPLES:
                self._kept.popitem(last=False)
        return self._kept[key]

    def _remote_window(self, number: int) -> dict[int, NDArray[np.int32]]:
        """A window's samples, read in the order of their shards."""
        if number not in self._remote:
            while len(self._remote) > self._lanes:
                del self._remote[next(iter(self._remote))]
            window = self._order.window(number)
            order = np.lexsort((window.samples, window.shards))
            self._remote[number] = {
                int(place): self._reader.read(int(window.shards[place]), int(window.samples[place])) for place in order
            }
        return self._remote[number]


def _check(
    sequence_length: int, batch_size: int, packing: str, split: str, rank: int, world_size: int, lanes: int
) -> None:
    problems = [
        RequestError(f"{value}", where=name, needed="1 or more")
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size), ("lanes", lanes))
        if value < 1
    ]
    for name, value, known in (("packing", packing, ("concat", "pad")), ("split", split, ("tokens", "shards"))):
        if value not in known:
            problems.append(RequestError(f"{value!r}", where=name, needed=" or ".join(known)))
    if not 0 <= rank < world_size:
        problems.append(RequestError(f"rank {rank} of {world_size}", where="rank"))
    if problems:
        raise RequestError.of_all(problems)
