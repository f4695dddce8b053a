"""Hands out work in the order of the input: items as they are, streams block by block, read by threads.

Decompression releases Python's lock, so the parent process reads several streams at once while workers encode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from pretrainkit.data.indexed.encode import BlockRequest, ItemRequest
from pretrainkit.data.indexed.encoded_chunk import Order
from pretrainkit.data.readers.records import RecordRules
from pretrainkit.data.readers.source import RangeCounts, Source
from pretrainkit.data.readers.work_items import WorkItem


class Feeder:
    """Gives the next request; None when there is none at the moment. At most `max_streams` streams are read at once."""

    def __init__(
        self,
        items: dict[int, WorkItem],
        sources: list[Source],
        rules: RecordRules,
        done: Container[Order],
        max_streams: int,
        wake: Callable[[], None],
    ) -> None:
        self._items, self._sources, self._rules, self._done = deque(items.items()), sources, rules, done
        self._max_streams, self._wake = max_streams, wake
        self._threads = ThreadPoolExecutor(max_streams, thread_name_prefix="read")
        self._streams: list[tuple[Iterator[BlockRequest], Future[BlockRequest | None]]] = []

    def next(self, *, may_be_block: bool) -> ItemRequest | BlockRequest | None:
        """The earliest request there is now; a block takes memory. Raises what reading a stream has raised."""
        for position, (blocks, future) in enumerate(self._streams):
            if may_be_block and future.done():
                if block := future.result():
                    self._streams[position] = blocks, self._read_next(blocks)
                    return block
                del self._streams[position]
                return self.next(may_be_block=may_be_block)
        while self._items:
            number, item = self._items[0]
            if item.is_stream and len(self._streams) >= self._max_streams:
                return None
            self._items.popleft()
            if not item.is_stream:
                return ItemRequest(number, item)
            blocks = self._blocks(number, item)
            self._streams.append((blocks, self._read_next(blocks)))
        return None

    def _read_next(self, blocks: Iterator[BlockRequest]) -> Future[BlockRequest | None]:
        future = self._threads.submit(next, blocks, None)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _blocks(self, number: int, item: WorkItem) -> Iterator[BlockRequest]:
        """The blocks of a stream that are not done yet, then its end: an empty block."""
        (part,) = item.ranges
        counts, block = RangeCounts(part.source), 0
        for found in self._sources[part.source].blocks(part, self._rules, counts):
            if (number, block) not in self._done:
                yield BlockRequest(number, block, part.source, found.data, found.disk_bytes)
            block += 1
        if (number, block) not in self._done:
            yield BlockRequest(number, block, part.source, b"", 0, tuple(counts.digests), is_last=True)

    @property
    def is_exhausted(self) -> bool:
        """Whether no request will come any more."""
        return not (self._items or self._streams)

    def stop(self) -> None:
        """Give no more requests, and wait for the reading threads."""
        self._items.clear()
        self._streams.clear()
        self._threads.shutdown(cancel_futures=True)
