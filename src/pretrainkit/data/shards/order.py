"""The order of an epoch over token shards: the parts of samples that make up each batch. Pure arithmetic.

Samples have weights: their number of tokens when they are concatenated and cut into rows, their number of rows
when each has separate rows. Shards come in an order drawn from seed and epoch; the samples of each window of
`shuffle_buffer` are permuted. A row is a range of weights in that order. Since the weights are in the tables next
to the shards, any batch is found without reading the ones before it.

A rank's batches are dealt out of `lanes` equal ranges of rows in turn, so that they mix distant shards, and so
that workers which are as many as lanes, or a divisor of that, each read a different range.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Window:
    """Samples that were permuted together."""

    shards: NDArray[np.int64]
    """[N] position in the list of shards."""
    samples: NDArray[np.int64]
    """[N] position in the shard."""
    ends: NDArray[np.int64]
    """[N] running weights, from the epoch's beginning, after each sample."""
    begin: int
    """Weight before the first."""


class EpochOrder:
    """The order of some shards in one epoch. `tables` are those of the shards in their drawn order."""

    def __init__(
        self,
        shards: list[int],
        tables: list[NDArray[Any]],
        weigh: Callable[[NDArray[Any]], NDArray[np.int64]],
        *,
        shuffle_buffer: int,
        seed: tuple[int, ...],
    ) -> None:
        self._shards = np.array(shards, np.int64)
        self._tables, self._weigh, self._seed = tables, weigh, seed
        self._is_shuffled = shuffle_buffer > 0
        self._window_samples = shuffle_buffer if self._is_shuffled else 1 << 14
        counts = np.array([len(table) for table in tables], np.int64)
        self._first = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.num_samples = int(self._first[-1])
        self._window_begins = self._weights_before_windows()
        self._windows: OrderedDict[int, Window] = OrderedDict()

    def _weights_before_windows(self) -> NDArray[np.int64]:
        num_windows = -(-self.num_samples // self._window_samples)
        weights = np.zeros(num_windows + 1, np.int64)
        for first, table in zip(self._first[:-1].tolist(), self._tables, strict=True):
            own = self._weigh(table)
            windows = np.arange(first, first + len(table)) // self._window_samples
            begins = np.flatnonzero(np.diff(windows, prepend=-1))
            weights[windows[begins] + 1] += np.add.reduceat(own, begins)
        return np.cumsum(weights)

    def window(self, number: int) -> Window:
        """Its samples, in order."""
        if number in self._windows:
            self._windows.move_to_end(number)
            return self._windows[number]
        begin = number * self._window_samples
        places = np.arange(begin, min(begin + self._window_samples, self.num_samples))
        of_table = np.searchsorted(self._first, places, side="right") - 1
        samples = places - self._first[of_table]
        weights = np.empty(len(places), np.int64)
        for table in np.unique(of_table):
            chosen = of_table == table
            weights[chosen] = self._weigh(self._tables[table][samples[chosen]])
        if self._is_shuffled:
            order = np.random.Generator(np.random.PCG64([*self._seed, 1, number])).permutation(len(places))
            of_table, samples, weights = of_table[order], samples[order], weights[order]
        start = int(self._window_begins[number])
        found = Window(self._shards[of_table], samples, np.cumsum(weights) + start, start)
        self._windows[number] = found
        while len(self._windows) > 64:
            self._windows.popitem(last=False)
        return found

    def parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """The parts of samples in a range of weights, in order.

        Gives the window's number, the sample's position in it, and begin and end in the sample's own weights.
        """
        number = int(np.searchsorted(self._window_begins, begin, side="right")) - 1
        while begin < end:
            window = self.window(number)
            place = int(np.searchsorted(window.ends, begin, side="right"))
            while place < len(window.ends) and begin < end:
                before = int(window.ends[place - 1]) if place else window.begin
                upto = min(end, int(window.ends[place]))
                if upto > begin:
                    yield number, place, begin - before, upto - before
                begin, place = max(begin, upto), place + 1
            number += 1


def shard_order(num_shards: int, *, shuffle: bool, seed: tuple[int, ...]) -> list[int]:
    """The order in which an epoch takes its shards."""
    if not shuffle:
        return list(range(num_shards))
    return np.random.Generator(np.random.PCG64([*seed, 0])).permutation(num_shards).tolist()


def first_row(batch: int, num_batches: int, batch_size: int, lanes: int) -> int:
    """The first row of a batch, counted within its rank's rows."""
    lane, position = batch % lanes, batch // lanes
    per_lane, remainder = divmod(num_batches, lanes)
    return (lane * per_lane + min(lane, remainder) + position) * batch_size
