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
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from pretrainkit.data.shards.batches import TokenBatches
from pretrainkit.data.shards.shard_set import open_shards
from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)


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
