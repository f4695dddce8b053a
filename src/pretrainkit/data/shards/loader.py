"""A PyTorch DataLoader over token shards, for a training script of your own.

    from pretrainkit.data.shards import make_loader
    loader = make_loader("data/shards", sequence_length=4096, batch_size=8)
    for batch in loader:  # one epoch: input_ids, attention_mask and labels, each [batch_size, sequence_length]
        ...
    loader.state_dict(), loader.load_state_dict(state)

Batch i of an epoch is the same whatever the number of workers, so a run may continue in the middle of an epoch
with another number; only the samples that the next batches need are read again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from pretrainkit.data.shards.order import EpochOrder, first_row, shard_order
from pretrainkit.data.shards.shard_set import ShardReader, ShardSet, open_shards
from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
IGNORED_LABEL = -100
"""Label that Hugging Face models leave out of the loss."""
KEPT_SAMPLES = 64
"""Decoded samples that are cached: the rest of a sample may be in the next row."""


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """How samples become batches; `make_loader` says what each setting means. Raises RequestError."""

    sequence_length: int
    batch_size: int
    packing: str = "concat"
    pad_to_multiple: int = 8
    rank: int = 0
    world_size: int = 1
    split: str = "tokens"
    shuffle_buffer: int = 10_000
    shuffle_shards: bool = True
    seed: int = 0
    lanes: int = 8
    """Enough for eight workers that read different shards."""

    def __post_init__(self) -> None:
        problems = [
            RequestError(f"{getattr(self, name)}", where=name, needed="1 or more")
            for name in ("sequence_length", "batch_size", "lanes")
            if getattr(self, name) < 1
        ]
        for name, known in (("packing", ("concat", "pad")), ("split", ("tokens", "shards"))):
            if getattr(self, name) not in known:
                problems.append(RequestError(f"{getattr(self, name)!r}", where=name, needed=" or ".join(known)))
        if not 0 <= self.rank < self.world_size:
            problems.append(RequestError(f"rank {self.rank} of {self.world_size}", where="rank"))
        RequestError.raise_all(problems)


class TokenBatches(Dataset[dict[str, torch.Tensor]]):
    """The batches of one rank, by number. `set_epoch` chooses the epoch."""

    def __init__(self, shards: ShardSet, **settings: Any) -> None:
        """See `make_loader`. Raises RequestError."""
        self.settings = BatchSettings(**settings)
        self._set, self._reader = shards, ShardReader(shards.shards, KEPT_SAMPLES)
        eod = shards.records[0].tokenizer.eod_id if shards.records else None
        self._padding_id = eod or 0  # its label is ignored, so it is never trained on
        self._tokens_per_weight = 1 if self.settings.packing == "concat" else self.settings.sequence_length
        self._remote: dict[int, dict[int, NDArray[np.int32]]] = {}
        self.set_epoch(0)
        if not len(self):
            s = self.settings
            raise RequestError(
                f"{shards.num_tokens} tokens in {shards.num_samples} samples don't fill a batch on every rank",
                needed=f"{s.world_size} ranks x {s.batch_size} rows x {s.sequence_length} tokens",
                action="take a smaller batch, shorter rows or fewer ranks",
            )

    def identity(self) -> dict[str, Any]:
        """What must be equal for a state to mean the same place."""
        settings = asdict(self.settings)
        del settings["pad_to_multiple"]
        return {"data_hash": self._set.data_hash, **settings}

    def set_epoch(self, epoch: int) -> None:
        """Switch to the order of an epoch."""
        s = self.settings
        self._remote.clear()
        seed = (s.seed, epoch)
        order = shard_order(len(self._set.shards), shuffle=s.shuffle_shards, seed=seed)
        self._first_row = 0
        if s.split == "shards":
            if len(order) < s.world_size:
                raise RequestError(
                    f"{len(order)} shards with samples for {s.world_size} ranks",
                    where="split='shards'",
                    needed="a shard for each rank",
                    action="use split='tokens', which gives every rank equal parts of all shards",
                )
            rows = [self._num_rows(order[rank :: s.world_size]) for rank in range(s.world_size)]
            self._num_batches = min(rows) // s.batch_size
            used, order = sum(rows), order[s.rank :: s.world_size]
        else:
            used = self._num_rows(order)
            self._num_batches = used // (s.batch_size * s.world_size)
            self._first_row = s.rank * self._num_batches * s.batch_size
        self.num_dropped_rows = used - self._num_batches * s.batch_size * s.world_size
        """Rows at the end of the epoch that don't fill a batch on every rank."""
        tables = [self._set.shards[number].table for number in order]
        self._order = EpochOrder(order, tables, self._weigh, shuffle_buffer=s.shuffle_buffer, seed=seed)

    def _weigh(self, table: NDArray[Any]) -> NDArray[np.int64]:
        return -(-table["num_tokens"].astype(np.int64) // self._tokens_per_weight)

    @property
    def _weight_per_row(self) -> int:
        return self.settings.sequence_length // self._tokens_per_weight

    def _num_rows(self, shards: list[int]) -> int:
        return sum(int(self._weigh(self._set.shards[number].table).sum()) for number in shards) // self._weight_per_row

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if not 0 <= number < self._num_batches:
            raise IndexError(number)
        s = self.settings
        first = self._first_row + first_row(number, self._num_batches, s.batch_size, s.lanes)
        rows = [self.row(row) for row in range(first, first + s.batch_size)]
        length = s.sequence_length
        if s.packing == "pad":
            multiple = max(1, s.pad_to_multiple)
            length = min(length, -(-max(map(len, rows)) // multiple) * multiple)
        input_ids = np.full((s.batch_size, length), self._padding_id, np.int64)
        labels = np.full((s.batch_size, length), IGNORED_LABEL, np.int64)
        mask = np.zeros((s.batch_size, length), np.int64)
        for place, ids in enumerate(rows):
            input_ids[place, : len(ids)] = labels[place, : len(ids)] = ids
            mask[place, : len(ids)] = 1
        arrays = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def row(self, row: int) -> NDArray[np.int32]:
        """The ids of a row of this rank's shards, without padding."""
        unit, tokens = self._weight_per_row, self._tokens_per_weight
        found = self._order.parts(row * unit, (row + 1) * unit)
        parts = [self._ids(window, place)[begin * tokens : end * tokens] for window, place, begin, end in found]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _ids(self, number: int, place: int) -> NDArray[np.int32]:
        """The ids of a sample, by its window and its position there."""
        window = self._order.window(number)
        shard = int(window.shards[place])
        if self._set.shards[shard].is_local:
            return self._reader.read(shard, int(window.samples[place]))
        if number not in self._remote:  # all of a window's samples are read in the order of their shards
            while len(self._remote) > self.settings.lanes:
                del self._remote[next(iter(self._remote))]
            order = np.lexsort((window.samples, window.shards))
            self._remote[number] = {
                int(place): self._reader.read(int(window.shards[place]), int(window.samples[place])) for place in order
            }
        return self._remote[number][place]


class _Remaining:
    """Sampler: numbers of the batches that are left."""

    def __init__(self, dataset: TokenBatches) -> None:
        self.dataset, self.first = dataset, 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, len(self.dataset)))

    def __len__(self) -> int:
        return len(self.dataset)


class ShardLoader(DataLoader[dict[str, torch.Tensor]]):
    """Iterates one epoch at a time, and can save and restore its position."""

    def __init__(self, dataset: TokenBatches, *, num_workers: int, prefetch_factor: int, pin_memory: bool) -> None:
        self.batches = dataset
        self.epoch, self.next_batch = 0, 0
        self._remaining = _Remaining(dataset)
        super().__init__(
            dataset,
            batch_size=None,
            sampler=self._remaining,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor if num_workers else None,
            pin_memory=pin_memory,
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self.batches.set_epoch(self.epoch)
        self._remaining.first = self.next_batch
        for batch in super().__iter__():
            self.next_batch += 1
            yield batch
        self.epoch, self.next_batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, for `load_state_dict` of a loader with any number of workers."""
        return {"epoch": self.epoch, "next_batch": self.next_batch, "identity": self.batches.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Raises RequestError when it belongs to other data or settings."""
        here = self.batches.identity()
        different = [name for name, value in here.items() if state["identity"].get(name) != value]
        if different:
            changes = ", ".join(
                f"{name} {state['identity'].get(name)!r} then, {here[name]!r} now" for name in different
            )
            raise RequestError(
                f"this state belongs to other batches: {changes}", action="create the loader with the same settings"
            )
        self.epoch, self.next_batch = state["epoch"], state["next_batch"]


def make_loader(
    shards: str | Path | list[str],
    *,
    sequence_length: int,
    batch_size: int,
    num_workers: int = 2,
    prefetch_factor: int = 4,
    pin_memory: bool | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    **settings: Any,
) -> ShardLoader:
    """A DataLoader over the shards for this rank.

    Args:
        shards: a folder, or paths or URLs that WebDataset opens, with `{00000..00009}` or `*`. Next to each
            tar there must be its record and table, as make_shards.py writes them.
        sequence_length: tokens in a row.
        batch_size: rows in a batch of this rank.
        num_workers: processes that read; 0 for this one.
        prefetch_factor: batches that each has ready.
        pin_memory: None: where there is a GPU.
        rank, world_size: None: from torch.distributed, else RANK and WORLD_SIZE.
        **settings: packing: `concat` cuts the concatenated samples into full rows, `pad` gives each sample rows of
            its own (longer ones several), filled up to a multiple of `pad_to_multiple` with labels ignored;
            split: `tokens` gives every rank an equal part of the epoch, `shards` whole shards, and refuses fewer
            shards than ranks; shuffle_buffer: samples that are permuted together, 0 for none; shuffle_shards;
            seed; lanes: ranges that batches are dealt from (with URLs, take `num_workers` or a multiple).

    Every rank gets the same number of batches; the rows that are left over are counted in the log.
    Raises RequestError.
    """
    if rank is None or world_size is None:
        rank, world_size = _this_rank()
    batches = TokenBatches(
        open_shards(shards),
        sequence_length=sequence_length,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        **settings,
    )
    if rank == 0:
        LOGGER.info(
            "%d batches an epoch for each of %d ranks; %d rows are left over",
            len(batches),
            world_size,
            batches.num_dropped_rows,
        )
    if pin_memory is None:
        pin_memory = torch.cuda.is_available()
    return ShardLoader(batches, num_workers=num_workers, prefetch_factor=prefetch_factor, pin_memory=pin_memory)


def _this_rank() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
