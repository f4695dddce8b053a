"""Who encodes the blocks of shards: this process itself, or worker processes; with the library that proved right.

Each worker has a pipe of its own. In a ProcessPoolExecutor they share one, and if a worker is killed while it sends a
piece, the others wait for the pipe's lock for ever, and the parent for the rest of the piece.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from pretrainkit.data.shards.request import ShardPlan
from pretrainkit.data.shards.task import Block, Piece, ShardEncoder, ShardSetup, run_worker
from pretrainkit.data.tokens.encoder import Encoder, EngineSpec, default_engine, load_encoder, num_threads, one_thread
from pretrainkit.data.tokens.parity import ParitySample, first_difference
from pretrainkit.data.tokens.pool import Reference, is_forkable
from pretrainkit.errors import DataError, PretrainkitError
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
BLOCKS_AHEAD = 2
"""Blocks in hand for each worker: bounds memory."""


class _Pool:
    """Worker processes, and a thread here for each, that hands it a block and takes the piece."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._idle: SimpleQueue[tuple[Any, Connection]] = SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def start(self, count: int, context: Any, arguments: tuple[Any, ...]) -> None:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=run_worker, args=(theirs, *arguments), daemon=True)
            self._processes.append(process)  # before it starts: a signal in between must not lose it
            process.start()
            theirs.close()  # so that the pipe ends with the worker
            self._idle.put((process, ours))
        self._threads = ThreadPoolExecutor(count)

    def submit(self, block: Block) -> Future[Piece]:
        assert self._threads is not None
        return self._threads.submit(self._ask, block)

    def _ask(self, block: Block) -> Piece:
        """A block's piece. Raises what the worker raised; DataError if it died."""
        process, connection = self._idle.get()
        try:
            connection.send(block)
            reply = connection.recv()
        except (EOFError, OSError) as error:
            process.join()
            raise DataError(
                f"a worker process ended ({process.exitcode}); the kernel kills one (-9) when memory runs out",
                action="run the same task again, with fewer --workers if memory was short",
            ) from error
        finally:
            self._idle.put((process, connection))
        if isinstance(reply, PretrainkitError):
            raise reply
        return reply

    def kill(self) -> None:
        """End all at once: what a thread waits for here ends with its worker."""
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)


class ShardWorkers:
    """Encodes blocks of these shards, once it is started. Use as a context: leaving it ends all worker processes.

    They ignore signals, so that end must not be cut short: what turns signals into exceptions belongs inside.
    """

    def __init__(self, plan: ShardPlan, shard_ids: list[int]) -> None:
        self._plan, self._shard_ids = plan, shard_ids
        self._pool: _Pool | None = None
        self._encoder: ShardEncoder | None = None
        self.count = plan.request.workers
        self.engine = default_engine() if plan.request.engine == "auto" else "tokenizers"
        """The library that encodes."""

    def __enter__(self) -> ShardWorkers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_pool()

    def start(self) -> None:
        """Choose the library, and begin."""
        one_thread()
        if self.engine == "fastokens" and not self._start_fast():
            self.engine = "tokenizers"
            self._end_pool()
        if self.engine == "tokenizers":
            self._start(None)

    def _end_pool(self) -> None:
        if self._pool is not None:
            self._pool.kill()
            self._pool = None

    def _start(self, encoder: Encoder | None, *, may_fork: bool = False) -> None:
        """Begin with this encoder. Forked workers share it; where nothing may be forked, each loads its own."""
        if self.count == 1:
            self._encoder = ShardEncoder(self._setup(), encoder or load_encoder(self._spec(self.engine)))
            return
        context: Any = get_context("fork" if may_fork else "spawn")
        if may_fork:
            gc.freeze()  # what is there now stays: the collector need not touch, and so copy, shared pages
        arguments = (self._setup(), self._spec(self.engine), encoder if may_fork else None)
        self._pool = _Pool()
        self._pool.start(self.count, context, arguments)

    def _spec(self, engine: str) -> EngineSpec:
        plan = self._plan
        return EngineSpec(engine, str(plan.tokenizer.json_path), plan.request.special_tokens_in_text == "encode")

    def _setup(self) -> ShardSetup:
        """What holds for all blocks; the key's prefix comes with each shard."""
        plan = self._plan
        return ShardSetup(
            first_ids=plan.first_ids,
            last_ids=plan.last_ids,
            num_ids=plan.tokenizer.num_ids,
            ids_format=plan.request.ids_format,
            has_text=plan.request.has_text,
            rules=plan.rules,
        )

    def _start_fast(self) -> bool:
        """Begin with fastokens, if it gives the ids of tokenizers on hard strings and a sample of these shards' input.

        What tokenizers gives is asked in a process of its own, beside the loading of fastokens here.
        """
        plan = self._plan
        reference = None
        if plan.request.verify_tokens != "off":
            units = [unit for number in self._shard_ids for unit in plan.units(number)]
            question = ParitySample.about(plan.tokenizer.special_tokens, plan.sources, units, plan.rules)
            reference = Reference(self._spec("tokenizers"), question)
        may_fork, threads_before = is_forkable(), num_threads()
        try:
            try:
                fast = load_encoder(self._spec("fastokens"))
            except Exception as error:  # whatever a Rust library thinks of a tokenizer
                LOGGER.warning("fastokens is not used, tokenizers encodes instead (slower): %s", error)
                return False
            # Before this process encodes anything: a library's threads don't live on in forked workers.
            self._start(fast, may_fork=may_fork and num_threads() == threads_before)
            if reference is None:
                return True
            difference = first_difference(fast, reference.answers())
        finally:
            if reference is not None:
                reference.end()
        if difference:
            LOGGER.warning("fastokens is not used, tokenizers encodes instead (slower): %s", difference)
            return False
        LOGGER.info("fastokens gives the ids of tokenizers on hard strings and a sample of this input")
        return True

    def pieces(self, blocks: Iterator[Block]) -> Iterator[tuple[Block, Piece]]:
        """Every block with its piece, in order."""
        if self._encoder is not None:
            for block in blocks:
                yield block, self._encoder.piece(block)
            return
        assert self._pool is not None
        waiting: deque[tuple[Block, Future[Piece]]] = deque()
        for block in blocks:
            waiting.append((block, self._pool.submit(block)))
            if len(waiting) >= BLOCKS_AHEAD * self.count:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
