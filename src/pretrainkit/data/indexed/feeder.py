"""Hands out work in the order of the input: units as they are, streams block by block, read by threads.

Decompression leaves Python's lock, so the parent process reads several streams at once while workers encode.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from pretrainkit.data.readers.chunks import Unit
from pretrainkit.data.readers.sources import Source
from pretrainkit.data.readers.streams import PieceHash, read_blocks
from pretrainkit.errors import PretrainkitError

BLOCKS_AHEAD = 2
"""Blocks that wait for a worker, per stream: bounds the parent's memory."""


@dataclass(frozen=True)
class UnitTask:
    """A unit that the worker reads itself."""

    number: int
    unit: Unit


@dataclass(frozen=True)
class BlockTask:
    """A block of a stream."""

    unit: int
    block: int
    source: int
    disk_bytes: int
    data: bytes


@dataclass(frozen=True)
class _End:
    num_blocks: int
    digests: list[str]


class _Reader:
    """A thread that reads one stream."""

    def __init__(self, number: int, unit: Unit, source: Source, done: set[tuple[int, int]], wake: Callable[[], None]):
        self.number, self.unit, self.source = number, unit, source
        self.items: queue.Queue[BlockTask | _End | BaseException] = queue.Queue(BLOCKS_AHEAD)
        self._done, self._wake, self._stopped = done, wake, threading.Event()
        self.thread = threading.Thread(target=self._read, name=f"read {source.path}", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        hashed, position, num_blocks = PieceHash(), 0, 0
        try:
            for data, offset in read_blocks(self.source, hashed):
                if (self.number, num_blocks) not in self._done:
                    source = self.unit.spans[0].source
                    self._put(BlockTask(self.number, num_blocks, source, offset - position, data))
                if self._stopped.is_set():
                    return
                position, num_blocks = offset, num_blocks + 1
            self._put(_End(num_blocks, hashed.finish()))
        except BaseException as error:
            self._put(error)

    def _put(self, item: BlockTask | _End | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                self.items.put(item, timeout=0.2)
            except queue.Full:
                continue
            self._wake()
            return

    def stop(self) -> None:
        """End the thread soon."""
        self._stopped.set()


class Feeder:
    """Gives the next task; None when there is none at the moment."""

    def __init__(
        self,
        units: dict[int, Unit],
        sources: list[Source],
        done: set[tuple[int, int]],
        ended: dict[int, int],
        max_streams: int,
        wake: Callable[[], None],
        on_end: Callable[[int, int, list[str]], None],
    ) -> None:
        self._sources, self._done, self._max_streams = sources, done, max_streams
        self._wake, self._on_end = wake, on_end
        self._waiting = [
            (number, unit)
            for number, unit in units.items()
            if not (_is_finished(number, ended, done) if unit.is_stream else (number, 0) in done)
        ]
        self._position = 0
        self._readers: list[_Reader] = []

    def next(self) -> UnitTask | BlockTask | None:
        """The earliest task there is now. Raises what a reader met."""
        for reader in list(self._readers):
            try:
                item = reader.items.get_nowait()
            except queue.Empty:
                continue
            if isinstance(item, BlockTask):
                return item
            self._readers.remove(reader)
            if isinstance(item, _End):
                self._on_end(reader.number, item.num_blocks, item.digests)
                continue
            if isinstance(item, PretrainkitError | MemoryError):
                raise item
            raise RuntimeError(f"reading {reader.source.path} failed") from item
        while self._position < len(self._waiting):
            number, unit = self._waiting[self._position]
            if unit.is_stream:
                if len(self._readers) >= self._max_streams:
                    return None
                source = self._sources[unit.spans[0].source]
                self._readers.append(_Reader(number, unit, source, self._done, self._wake))
                self._position += 1
                continue
            self._position += 1
            return UnitTask(number, unit)
        return None

    @property
    def is_exhausted(self) -> bool:
        """Whether no task will come any more."""
        return self._position == len(self._waiting) and not self._readers

    def stop(self) -> None:
        """End the reading threads."""
        for reader in self._readers:
            reader.stop()
        for reader in self._readers:
            reader.thread.join()
        self._readers = []
        self._position = len(self._waiting)


def _is_finished(number: int, ended: dict[int, int], done: set[tuple[int, int]]) -> bool:
    return number in ended and all((number, block) in done for block in range(ended[number]))
