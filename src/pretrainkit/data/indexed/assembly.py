"""Brings encoded chunks into the order of the input, whatever order they come in, and finishes outputs.

A chunk's place is known once all earlier ones are encoded. Its worker holds it in memory until then, and writes
it there itself. A worker that would hold too many puts them into its part file; from there one of a few threads
copies them to their place. What is in its place is written down as moved.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from pretrainkit.data.indexed.journal import Journal, Order
from pretrainkit.data.indexed.output import Output, copy_from_part, part_holds
from pretrainkit.data.indexed.parts import remove_part
from pretrainkit.data.indexed.results import ChunkResult
from pretrainkit.data.readers.chunks import Unit
from pretrainkit.errors import DataError
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
COPY_THREADS = 4
"""In-kernel copies run at some GB/s each, a worker makes about 0.1: enough for more cores than a node has."""
MAX_HELD = 3
"""Chunks that a worker holds in memory while their place is not known."""
FLUSH_BYTES = 64 << 20
"""Copied bytes after which the disk is made to follow, so that little is left to flush at the end."""


class Assembly:
    """All outputs of a run; one is open at a time."""

    def __init__(
        self,
        journal: Journal,
        units: dict[int, Unit],
        outputs: list[Output],
        source_names: list[str],
        finish_output: Callable[[Output], None],
        send: Callable[..., None],
        wake: Callable[[], None],
    ) -> None:
        self._send, self._wake = send, wake
        self._journal, self._units, self._outputs, self._names = journal, units, outputs, source_names
        self._finish_output = finish_output
        self._pending: dict[Order, ChunkResult] = {}
        self._ends: dict[int, tuple[int, list[str]]] = {}
        self._queue = deque(units)
        self._block = 0
        self._current = 0
        self._moving: deque[tuple[ChunkResult, Future[None], tuple[int, int]]] = deque()
        self._holders: dict[Order, int] = {}
        self._spilling: set[Order] = set()
        self._writes: dict[Order, Future[None]] = {}
        self._in_part: Counter[str] = Counter()
        self._newest_part: dict[str, str] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._flush: Future[None] | None = None
        self._unflushed = 0
        self.done: set[Order] = set()
        """Chunks that need no work any more."""

    def resume(self) -> None:
        """Take over what an earlier process left, as far as its checksums hold."""
        state = self._journal.state
        for number, output in enumerate(self._outputs):
            if number < state.finished:
                output.commit()
                if not output.is_committed():
                    raise DataError(
                        "this finished output was removed while others were not finished",
                        where=output.prefixes[0],
                        action="run again with --no-resume",
                    )
                if number >= state.committed:
                    self._journal.add_committed(number)
        self._current = state.finished
        while self._queue and self._units[self._queue[0]].output < self._current:
            unit = self._queue.popleft()
            blocks = state.ends[unit][0] if self._units[unit].is_stream else 1
            self.done |= {(unit, block) for block in range(blocks)}
        self._ends = {unit: end for unit, end in state.ends.items() if unit in set(self._queue)}
        if self._current < len(self._outputs):
            output = self._outputs[self._current]
            output.open()
            self._take_moved(output)
        dropped, waiting = 0, set(self._queue)
        for order, result in state.results.items():
            if order[0] in waiting and order not in self.done:
                if part_holds(self._journal.folder, result):
                    self._register(result)
                else:
                    dropped += 1
        state.results.clear()
        if dropped:
            LOGGER.info("%d chunks of the unfinished run are damaged or lost and are encoded again", dropped)

    def _take_moved(self, output: Output) -> None:
        state = self._journal.state
        if not output.holds_rejects(state.rejects):
            return
        for order in state.moved:
            if order != self._next_order() or not output.holds(state.results[order]):
                # Rejects are one stream: with them, what was moved counts whole or not at all.
                if state.rejects[0]:
                    output.forget()
                    self.done -= set(state.moved)
                    self._queue, self._block = (
                        deque(u for u in self._units if self._units[u].output >= self._current),
                        0,
                    )
                return
            result = state.results[order]
            output.place(result)
            output.add_sources(result)
            self.done.add(order)
            self._step()
        output.rejects = state.rejects

    def _next_order(self) -> Order | None:
        """The chunk whose turn it is; passes the ends of streams."""
        while self._queue:
            unit = self._queue[0]
            if self._units[unit].output != self._current:
                return None
            if not self._units[unit].is_stream or unit not in self._ends or self._block < self._ends[unit][0]:
                return unit, self._block
            source = self._units[unit].spans[0].source
            self._outputs[self._current].end_source(source, self._ends[unit][1])
            self._queue.popleft()
            self._block = 0
        return None

    def _step(self) -> None:
        if self._units[self._queue[0]].is_stream:
            self._block += 1
        else:
            self._queue.popleft()

    def _register(self, result: ChunkResult) -> None:
        self._pending[result.order] = result
        self.done.add(result.order)
        self._in_part[result.part] += 1
        self._newest_part[result.part.rsplit("-", 1)[0]] = result.part

    def add(self, worker: int, result: ChunkResult) -> None:
        """A worker has encoded a chunk."""
        if result.part:
            self._journal.add_result(result)
            self._register(result)
            return
        self._pending[result.order] = result
        self._holders[result.order] = worker
        held = [order for order, holder in self._holders.items() if holder == worker and order not in self._spilling]
        if len(held) > MAX_HELD:
            self._spilling.add(held[0])
            self._send(worker, "spill", held[0])

    def spilled(self, result: ChunkResult) -> None:
        """A worker has put a chunk that it held into its part."""
        self._spilling.discard(result.order)
        del self._holders[result.order]
        self._journal.add_result(result)
        self._register(result)

    def written(self, order: Order) -> None:
        """A worker has brought a chunk that it held to its place."""
        self._writes.pop(order).set_result(None)

    def end_stream(self, unit: int, num_blocks: int, digests: list[str]) -> None:
        """A stream has no more blocks."""
        if unit not in self._ends:
            self._journal.add_end(unit, num_blocks, digests)
            self._ends[unit] = num_blocks, digests

    def stream_ends(self) -> dict[int, int]:
        """Number of blocks of the streams that were read to their end."""
        return {unit: end[0] for unit, end in self._ends.items()}

    def advance(self, *, may_finish: bool = True) -> None:
        """Bring chunks to their place whose turn has come, write down those that are there, finish outputs."""
        while self._current < len(self._outputs):
            output = self._outputs[self._current]
            output.open()
            order = self._next_order()
            while order is not None and order in self._pending and order not in self._spilling:
                self._place(output, self._pending.pop(order))
                self._step()
                order = self._next_order()
            self._collect(output)
            if order is not None or self._moving or not may_finish:
                return
            self._finish(output)

    def _place(self, output: Output, result: ChunkResult) -> None:
        places = output.place(result)
        output.add_rejects(result, self._names)
        output.add_sources(result)
        if result.part:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy")
            future = self._threads.submit(copy_from_part, self._journal.folder, result, places)
            future.add_done_callback(lambda _: self._wake())
        else:
            future = self._writes[result.order] = Future()
            self._send(self._holders.pop(result.order), "write", result.order, places)
        self._moving.append((result, future, output.rejects))

    def _collect(self, output: Output) -> None:
        moved: list[Order] = []
        freed: set[str] = set()
        rejects = output.rejects
        while self._moving and self._moving[0][1].done():
            result, future, rejects = self._moving.popleft()
            future.result()
            moved.append(result.order)
            self._unflushed += sum(key.tokens_bytes for key in result.keys)
            if result.part:
                self._in_part[result.part] -= 1
                freed.add(result.part)
            else:
                self._journal.add_result(result)
        if not moved:
            return
        self._journal.add_moves(moved, rejects)
        newest = set(self._newest_part.values())
        for part in freed:
            if not self._in_part[part] and part not in newest:
                del self._in_part[part]
                remove_part(self._journal.folder, part)
        if self._unflushed > FLUSH_BYTES and (self._flush is None or self._flush.done()):
            if self._threads is None:
                self._threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy")
            if self._flush is not None:
                self._flush.result()
            self._flush, self._unflushed = self._threads.submit(output.flush), 0

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is on its way."""
        return not self._moving and not self._spilling

    def _finish(self, output: Output) -> None:
        if self._flush is not None:
            self._flush.result()
            self._flush = None
        self._finish_output(output)
        self._journal.add_finished(self._current)
        output.commit()
        self._journal.add_committed(self._current)
        self._current, self._block = self._current + 1, 0

    @property
    def is_complete(self) -> bool:
        """Whether all outputs have their final names."""
        return self._current == len(self._outputs)

    def lines_before(self, order: Order, source: int) -> int:
        """Lines of a file in all known chunks before one."""
        placed = self._outputs[self._current].sources.get(source) if not self.is_complete else None
        known = placed.num_lines if placed else 0
        for result in self._pending.values():
            if result.order < order:
                known += sum(span.num_lines for span in result.spans if span.source == source)
        return known

    def close(self) -> None:
        """Wait for running copies and let go of the files."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if not self.is_complete:
            self._outputs[self._current].close()
