"""Brings encoded chunks into the order of the input, whatever order they come in, and finishes outputs.

A chunk's place is known once all earlier ones are encoded. The worker that holds it in memory then writes it there;
from a part file one of a few threads copies it. The journal says which chunks are in their place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from pretrainkit.data.indexed.encode import PlaceRequest
from pretrainkit.data.indexed.encoded_chunk import EncodedChunk, Order, OutputOffset
from pretrainkit.data.indexed.output import Output
from pretrainkit.data.indexed.part_file import REJECTS, PartFile, part_path
from pretrainkit.data.indexed.state_folder import StateFolder
from pretrainkit.data.readers.work_items import WorkItem
from pretrainkit.errors import DataError
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
COPY_THREADS = 4
"""In-kernel copies run at some GB/s each, a worker makes about 0.1: enough for more cores than a node has."""
FLUSH_BYTES = 64 << 20
"""Tokens after which the disk is made to follow, so that little is left to flush at the end."""


class Assembly:
    """All outputs of a run; one is open at a time."""

    def __init__(
        self,
        state: StateFolder,
        items: dict[int, WorkItem],
        outputs: list[Output],
        finish_output: Callable[[Output], None],
        submit: Callable[[PlaceRequest, int], Future[bool]],
        wake: Callable[[], None],
    ) -> None:
        """`submit` has a certain worker place a chunk that it holds; `wake` is called when something can go on."""
        self._state, self._items, self._outputs, self._finish_output = state, items, outputs, finish_output
        self._submit, self._wake = submit, wake
        self._pending: dict[Order, EncodedChunk] = {}
        self._queue = deque(items)
        self._block = 0
        self._current = 0
        self._placing: deque[tuple[EncodedChunk, list[OutputOffset], tuple[int, int], Future[bool]]] = deque()
        self._threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy")
        self._flush: Future[None] | None = None
        self._unflushed = 0
        self.done: set[Order] = set()
        """Chunks that are in their place or in a part file."""

    def resume(self) -> None:
        """Take over what an earlier process left, as far as its checksums hold."""
        journal = self._state.journal
        self._current = journal.num_finished
        for output in self._outputs[: self._current]:
            output.commit()
            if not output.is_committed():
                raise DataError(
                    "this finished output was removed while others were not finished",
                    where=output.prefixes[0],
                    action="run again with --no-resume",
                )
        while self._queue and self._items[self._queue[0]].output < self._current:
            self._queue.popleft()
        for placed in journal.placed:
            output = self._outputs[self._current]
            if placed.chunk.order != self._next_order() or not output.holds(placed.chunk, placed.rejects):
                LOGGER.info("data of the unfinished run is damaged or lost and is encoded again")
                self._state.truncate(placed)
                break
            output.add(placed.chunk)
            output.rejects = placed.rejects
            self.done.add(placed.chunk.order)
            self._step(placed.chunk)
        journal.placed.clear()
        self._take_part_files()

    def _take_part_files(self) -> None:
        for path in self._state.path.glob("*.tmp"):
            path.unlink()
        remaining = set(self._queue)
        for path in self._state.path.glob("*.part"):
            try:
                part = PartFile(path)
            except ValueError:
                part = None
            if part and part.chunk.item in remaining and part.chunk.order not in self.done and part.is_undamaged():
                self._pending[part.chunk.order] = part.chunk
                self.done.add(part.chunk.order)
            else:
                path.unlink()

    def remaining(self) -> dict[int, WorkItem]:
        """The items of which something is not done."""
        last_blocks = {chunk.item: chunk.block for chunk in self._pending.values() if chunk.is_last}

        def is_done(number: int) -> bool:
            is_end_known = number in last_blocks
            return is_end_known and all((number, block) in self.done for block in range(last_blocks[number] + 1))

        return {number: self._items[number] for number in self._queue if not is_done(number)}

    def _next_order(self) -> Order | None:
        """The chunk of the current output whose turn it is."""
        if not self._queue or self._items[self._queue[0]].output != self._current:
            return None
        return self._queue[0], self._block

    def _step(self, chunk: EncodedChunk) -> None:
        self._block += 1
        if chunk.is_last:
            self._queue.popleft()
            self._block = 0

    def add(self, chunk: EncodedChunk, spilled: Order | None = None) -> None:
        """A worker has encoded a chunk, and put an earlier one that it held into its part file."""
        self._pending[chunk.order] = chunk
        if spilled in self._pending:
            self._pending[spilled].worker = None

    def advance(self, *, may_finish: bool) -> None:
        """Bring chunks to their place whose turn has come, record those that are there, finish outputs."""
        while not self.is_complete:
            output = self._outputs[self._current]
            while (order := self._next_order()) and order in self._pending:
                chunk = self._pending.pop(order)
                self._place(output, chunk)
                self._step(chunk)
            self._record(output)
            if order is not None or self._placing or not may_finish:
                return
            self._finish_output(output)
            self._state.add_finished(self._current)
            output.commit()
            self._current += 1

    def _place(self, output: Output, chunk: EncodedChunk) -> None:
        offsets = output.offsets()
        rejects = PartFile(part_path(self._state.path, chunk.order)).read(REJECTS) if chunk.has_rejects else b""
        output.add(chunk, rejects)
        self._placing.append((chunk, offsets, output.rejects, self._write(output, chunk, offsets)))

    def _write(self, output: Output, chunk: EncodedChunk, offsets: list[OutputOffset]) -> Future[bool]:
        if chunk.worker is None:
            future = self._threads.submit(self._copy, output, chunk, offsets)
        else:
            future = self._submit(PlaceRequest(chunk.order, output.files, offsets), chunk.worker)
        future.add_done_callback(lambda _: self._wake())
        return future

    def _copy(self, output: Output, chunk: EncodedChunk, offsets: list[OutputOffset]) -> bool:
        part = PartFile(part_path(self._state.path, chunk.order))
        for k, ((tokens, lengths), offset) in enumerate(zip(output.files, offsets, strict=True)):
            part.copy(2 * k, tokens, offset.tokens)
            part.copy(2 * k + 1, lengths, offset.lengths)
        return True

    def _record(self, output: Output) -> None:
        """Write down which chunks are in their place."""
        while self._placing and self._placing[0][-1].done():
            chunk, offsets, rejects, future = self._placing.popleft()
            if not future.result():  # its worker has put it into a part file meanwhile
                chunk.worker = None
                self._placing.appendleft((chunk, offsets, rejects, self._write(output, chunk, offsets)))
                return
            self._state.add_placed(chunk, rejects)
            if chunk.worker is None:
                part_path(self._state.path, chunk.order).unlink()
            self._unflushed += sum(key.tokens_bytes for key in chunk.keys)
        if self._unflushed > FLUSH_BYTES and (self._flush is None or self._flush.done()):
            self._unflushed = 0
            self._flush = self._threads.submit(output.flush)

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is on its way to its place."""
        return not self._placing

    @property
    def is_complete(self) -> bool:
        """Whether all outputs have their final names."""
        return self._current == len(self._outputs)

    def lines_before(self, chunk: EncodedChunk, range_number: int) -> int:
        """Lines before a range of a chunk in its file, once all earlier chunks are encoded."""
        source = chunk.ranges[range_number].source
        earlier = [counts for c in self._pending.values() if c.order < chunk.order for counts in c.ranges]
        placed = self._outputs[self._current].sources.values()
        ranges = (*placed, *earlier, *chunk.ranges[:range_number])
        return sum(counts.num_lines for counts in ranges if counts.source == source)

    def close(self) -> None:
        """Wait for running copies."""
        self._threads.shutdown(cancel_futures=True)
