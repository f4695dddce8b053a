"""Who encodes the blocks of shards: this process itself, or worker processes; with the library that proved right."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from types import TracebackType
from typing import Any

from pretrainkit.data.encoder import Encoder, EngineSpec, has_fastokens, load_encoder, num_threads, one_thread
from pretrainkit.data.pool import Reference, is_forkable
from pretrainkit.data.proof import Question, first_difference
from pretrainkit.data.shard_request import ShardPlan
from pretrainkit.data.shard_task import Block, Piece, ShardEncoder, ShardSetup, start_worker, warm_up, work
from pretrainkit.errors import DataError
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
BLOCKS_AHEAD = 2
"""Blocks in hand for each worker: bounds memory."""


class ShardWorkers:
    """Encodes blocks of these shards. Use as a context: leaving it ends all worker processes."""

    def __init__(self, plan: ShardPlan, shard_ids: list[int]) -> None:
        self._plan, self._shard_ids = plan, shard_ids
        self._pool: ProcessPoolExecutor | None = None
        self._encoder: ShardEncoder | None = None
        self.count = plan.request.workers
        self.engine = "fastokens" if plan.request.engine == "auto" and has_fastokens() else "tokenizers"
        """The library that encodes."""

    def __enter__(self) -> ShardWorkers:
        one_thread()
        try:
            if self.engine == "fastokens" and not self._start_fast():
                self.engine = "tokenizers"
                self._end_pool()
            if self.engine == "tokenizers":
                self._start(None)
        except BaseException:
            self._end_pool()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end_pool()

    def _end_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
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
        self._pool = ProcessPoolExecutor(self.count, context, start_worker, arguments)
        for _ in range(self.count):
            self._pool.submit(warm_up)

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
            question = Question.about(plan.tokenizer.special_tokens, plan.sources, units, plan.rules)
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
        try:
            for block in blocks:
                waiting.append((block, self._pool.submit(work, block)))
                if len(waiting) >= BLOCKS_AHEAD * self.count:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process ended; the kernel kills one when memory runs out",
                action="run the same task again, with fewer --workers if memory was short",
            ) from error
