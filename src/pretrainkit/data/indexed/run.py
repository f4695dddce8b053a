"""The loop of a preprocessing run: hands out work, brings encoded chunks to their place, finishes outputs.

Work is handed out in the order of the input. Streams are handed out block by block: threads read several at once, as
decompression releases Python's lock. A chunk's place is known once all earlier ones are encoded. The worker that holds
it in memory then writes it there; from part files any worker copies it. The journal says which chunks are in their
place. All that is waited for is a future whose result the loop takes, so nothing else changes its state.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from pretrainkit.data.byte_progress import ByteProgress
from pretrainkit.data.decontamination.overlap import build_index
from pretrainkit.data.indexed.chunk import Chunk, Column, Order, Target
from pretrainkit.data.indexed.encode import IndexedTask, Worker
from pretrainkit.data.indexed.output import Output
from pretrainkit.data.indexed.request import Plan
from pretrainkit.data.indexed.state_folder import StateFolder
from pretrainkit.data.readers.source import RangeCounts
from pretrainkit.data.readers.work_items import WorkItem
from pretrainkit.data.tokens import encoder
from pretrainkit.data.tokens.encode_pool import ITEMS_AHEAD, EncodePool
from pretrainkit.data.tokens.parity import EnginesDiffer, ParitySample
from pretrainkit.errors import DataError
from pretrainkit.logs import get_logger
from pretrainkit.units import format_count

LOGGER = get_logger(__name__)
Request: TypeAlias = Callable[[Worker], Chunk]
MAX_HELD_CHUNKS = 3
"""Chunks that a worker holds in memory while their place is not known; of more, the last goes to part files."""
FLUSH_BYTES = 64 << 20
"""Tokens after which the disk is made to follow, so that little is left to flush at the end."""


class Run:
    """One attempt with one engine."""

    def __init__(self, plan: Plan, state: StateFolder, pool: EncodePool, engine: str) -> None:
        self._plan, self._state, self._pool, self._engine = plan, state, pool, engine
        self._began_s = time.monotonic()
        self._is_proven = engine != "fastokens" or plan.request.verify_tokens == "off"
        self._outputs = [Output(plan, number) for number in range(len(plan.outputs))]
        self._current = 0
        """The output that is put together."""
        self._next: Order = (min(plan.items, default=0), 0)
        """The chunk that comes next in the output."""
        self._pending: dict[Order, Chunk] = {}
        """Encoded chunks whose turn has not come."""
        self._done: set[Order] = set()
        """Chunks that an earlier process has encoded."""
        self._held: dict[int, list[Chunk]] = defaultdict(list)
        """Pending chunks that are in workers' memory."""
        self._bad: list[Chunk] = []
        self._num_encoding = self._num_placing = self._num_open = self._num_unflushed = 0
        self._flush: Future[None] | None = None
        self._results: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def run(self) -> None:
        """Do what is left to do. Raises EnginesDiffer before any output is finished."""
        if self._state.is_resumed:
            self._resume()
            if self._is_complete:
                LOGGER.info("all of it was finished before")
                return
            LOGGER.info("continuing unfinished work: %d pieces are done", len(self._done))
        self._start_workers()
        remaining = self._remaining()
        self._waiting = deque(remaining.items())
        self._num_streams = 0
        self._blocks: dict[int, tuple[Request, Iterator[Request]]] = {}
        """By item the block of a stream that was read and is not handed out, and those after it."""
        self._start_progress(remaining)
        self._threads = ThreadPoolExecutor(len(self._pool) + 1)
        """One for each stream that is read, and one that flushes."""
        try:
            self._loop()
        finally:
            self._progress.close()
            self._threads.shutdown(cancel_futures=True)

    def _start_workers(self) -> None:
        plan = self._plan
        task = IndexedTask(replace(plan, items={}), build_index(plan.evaluations) if plan.evaluations else None)
        sample = None
        if not self._is_proven:
            sample = ParitySample.about(plan.tokenizer.special_tokens, plan.sources, [*plan.items.values()], plan.rules)
        engine = plan.request.engine_spec(self._engine, plan.tokenizer.json_path)
        comparison = self._pool.start(task, engine, plan.useful_workers(), sample)
        if sample is not None:
            # Compared while the work goes on; no output is finished before the result.
            self._when(comparison, self._take_comparison)

    def _take_comparison(self, difference: str) -> None:
        if difference:
            raise EnginesDiffer(difference)
        self._is_proven = True
        LOGGER.info(
            "fastokens %(fastokens)s gives the ids of tokenizers %(tokenizers)s on hard strings and a sample of this"
            " input",
            encoder.versions(),
        )

    def _when(self, future: Future[Any], take: Callable[[Any], None]) -> None:
        """Have the loop take a future's result, or raise its error, once it is there."""
        self._num_open += 1
        future.add_done_callback(lambda done: self._results.put(lambda: take(done.result())))

    def _loop(self) -> None:
        while True:
            self._hand_out()
            self._advance()
            if not self._num_open:
                break
            take = self._results.get()
            self._num_open -= 1
            take()
        self._report_bad_record()
        assert self._is_complete, "work ended before its outputs"

    @property
    def _is_complete(self) -> bool:
        """Whether all outputs have their final names."""
        return self._current == len(self._outputs)

    def _resume(self) -> None:
        """Take over what an earlier process left, as far as its checksums hold."""
        journal, folder = self._state.journal, self._state.path
        self._current = journal.num_finished
        for output in self._outputs[: self._current]:
            output.commit()
        finished = (number for number, item in self._plan.items.items() if item.output < self._current)
        self._next = max((number + 1 for number in finished), default=self._next[0]), 0
        placed, journal.placed = journal.placed, {}
        while self._next in placed and self._outputs[self._current].take(*placed[self._next]):
            journal.placed[self._next] = placed[self._next]
            self._step(placed[self._next][0])
        if len(journal.placed) < len(placed):
            LOGGER.info("data of the unfinished run is damaged or lost and is encoded again")
        parts = (chunk for order, chunk in journal.parts.items() if order >= self._next)
        journal.parts = {chunk.order: chunk for chunk in parts if chunk.is_in_parts(folder)}
        kept = {path for chunk in journal.parts.values() for path in chunk.part_files(folder)}
        for path in {*folder.glob("*.part")} - kept:
            path.unlink()
        self._pending, self._done = journal.parts, {*journal.placed, *journal.parts}
        self._state.begin()
        journal.placed = {}

    def _remaining(self) -> dict[int, WorkItem]:
        """The items of which something is not done."""
        last_blocks = {chunk.item: chunk.block for chunk in self._pending.values() if chunk.is_last}

        def is_done(number: int) -> bool:
            is_end_known = number in last_blocks
            return is_end_known and all((number, block) in self._done for block in range(last_blocks[number] + 1))

        items = self._plan.items.items()
        return {number: item for number, item in items if number >= self._next[0] and not is_done(number)}

    def _lacks_chunks(self) -> bool:
        """Whether the chunk that comes next belongs to the current output."""
        item = self._plan.items.get(self._next[0])
        return item is not None and item.output == self._current

    def _step(self, chunk: Chunk) -> None:
        self._next = (chunk.item + 1, 0) if chunk.is_last else (chunk.item, chunk.block + 1)

    def _hand_out(self) -> None:
        num_workers = len(self._pool)
        while self._num_encoding < ITEMS_AHEAD * num_workers and not self._bad:
            request = self._next_request(may_be_block=self._num_encoding <= num_workers)
            if request is None:
                return
            self._num_encoding += 1
            self._when(self._pool.submit(request), self._take_chunk)

    def _next_request(self, *, may_be_block: bool) -> Request | None:
        """The earliest request there is at the moment; a block takes memory."""
        if may_be_block and self._blocks:
            number = min(self._blocks)
            block, following = self._blocks.pop(number)
            self._read_block(number, following)
            return block
        while self._waiting:
            number, item = self._waiting[0]
            if item.is_stream and self._num_streams == len(self._pool):
                return None
            self._waiting.popleft()
            if not item.is_stream:
                return partial(Worker.encode_item, number=number, item=item)
            self._num_streams += 1
            self._read_block(number, self._stream(number, item))
        return None

    def _stream(self, number: int, item: WorkItem) -> Iterator[Request]:
        """The blocks of a stream that are not done yet, then its end: an empty block with the hashes of all."""
        (part,) = item.ranges
        hashes, block = RangeCounts(part.source), 0
        request = partial(Worker.encode_block, number=number)
        for found in self._plan.sources[part.source].blocks(part, self._plan.rules, hashes):
            if (number, block) not in self._done:
                counts = RangeCounts(part.source, num_bytes=len(found.data))
                yield partial(request, block=block, counts=counts, data=found.data, disk_bytes=found.disk_bytes)
            block += 1
        if (number, block) not in self._done:
            yield partial(request, block=block, counts=hashes, data=b"", disk_bytes=0)

    def _read_block(self, number: int, stream: Iterator[Request]) -> None:
        self._when(self._threads.submit(next, stream, None), partial(self._take_block, number, stream))

    def _take_block(self, number: int, stream: Iterator[Request], block: Request | None) -> None:
        if block is None:
            self._num_streams -= 1
        else:
            self._blocks[number] = block, stream

    def _take_chunk(self, chunk: Chunk) -> None:
        self._num_encoding -= 1
        if chunk.bad:
            self._bad.append(chunk)
            return
        self._show_progress(chunk)
        self._add(chunk)

    def _add(self, chunk: Chunk) -> None:
        self._pending[chunk.order] = chunk
        if chunk.worker is None:
            self._state.add_part(chunk)
            return
        held = self._held[chunk.worker]
        held.append(chunk)
        if len(held) > MAX_HELD_CHUNKS:
            self._put_into_parts(max(held, key=lambda other: other.order))

    def _put_into_parts(self, chunk: Chunk) -> None:
        """Have its worker write a chunk to part files. Its turn can't come before that is done."""
        del self._pending[chunk.order]
        written = self._write(chunk, chunk.parts(self._state.path))
        chunk.worker = None
        self._when(written, lambda _: self._add(chunk))

    def _write(self, chunk: Chunk, targets: list[Target]) -> Future[Any]:
        """Have the worker that holds a chunk write it, or any worker copy its part files."""
        if chunk.worker is not None:
            self._held[chunk.worker].remove(chunk)
        return self._pool.submit(partial(Worker.write, chunk=chunk, targets=targets), chunk.worker)

    def _advance(self) -> None:
        """Bring chunks to their place whose turn has come, and finish outputs."""
        while not self._is_complete:
            output = self._outputs[self._current]
            while self._lacks_chunks() and self._next in self._pending:
                self._place(output, self._pending.pop(self._next))
            if self._lacks_chunks() or self._num_placing or not self._is_proven:
                return
            output.check_rejected()
            output.finish(self._engine, time.monotonic() - self._began_s)
            self._state.add_finished(self._current)
            output.commit()
            self._current += 1

    def _place(self, output: Output, chunk: Chunk) -> None:
        targets = output.targets()
        output.add(chunk)
        self._step(chunk)
        self._num_placing += 1
        self._when(self._write(chunk, targets), partial(self._take_placed, output, chunk, output.rejects))

    def _take_placed(self, output: Output, chunk: Chunk, rejects: Column, _: None) -> None:
        self._num_placing -= 1
        self._state.add_placed(chunk, rejects)
        for path in chunk.part_files(self._state.path):
            path.unlink(missing_ok=True)
        self._num_unflushed += sum(column.num_bytes for column in chunk.columns)
        if self._num_unflushed > FLUSH_BYTES and (self._flush is None or self._flush.done()):
            self._num_unflushed, self._flush = 0, self._threads.submit(output.flush)

    def _start_progress(self, remaining: dict[int, WorkItem]) -> None:
        """A bar on a terminal, or lines in the log: what was encoded in this process."""
        total = sum(item.num_bytes for item in self._plan.items.values())
        left = sum(item.num_bytes for item in remaining.values())
        self._progress = ByteProgress(total, "preprocess", initial=total - left)
        self._text_bytes = self._num_tokens = self._num_documents = 0
        self._next_line = self._plan.request.log_interval

    def _show_progress(self, chunk: Chunk) -> None:
        self._text_bytes += sum(counts.num_bytes for counts in chunk.ranges)
        self._num_tokens += sum(map(sum, (counts.num_tokens for counts in chunk.ranges)))
        self._num_documents += max(lengths.num_bytes // 4 for lengths in chunk.columns[1 :: len(self._plan.columns)])
        elapsed_s = self._progress.elapsed_s
        note = (
            f"{self._num_documents} documents, {self._text_bytes / elapsed_s / 1e6:.1f} MB/s of text,"
            f" {format_count(self._num_tokens / elapsed_s)}tokens/s"
        )
        if self._progress.add(chunk.disk_bytes, note, may_log=self._num_documents >= self._next_line):
            self._next_line = self._num_documents + self._plan.request.log_interval

    def _report_bad_record(self) -> None:
        if not self._bad:
            return
        chunk = min(self._bad, key=lambda chunk: chunk.order)
        assert chunk.bad is not None
        number, record = chunk.bad
        source, output = chunk.ranges[number].source, self._outputs[self._plan.items[chunk.item].output]
        # Of earlier chunks that are not in the output some may hold the beginning of the same file.
        earlier = [counts for other in self._pending.values() if other.order < chunk.order for counts in other.ranges]
        lines = sum(counts.num_lines for counts in earlier if counts.source == source)
        path, line = output.line_of(chunk, number, record.line + lines)
        raise DataError(
            record.found,
            where=f"{path}:{line}",
            action=record.action(
                "fix the record, or set bad ones aside with --on-error skip; run again to continue from here"
            ),
        )
