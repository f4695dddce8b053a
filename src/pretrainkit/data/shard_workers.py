"""Who encodes the blocks of shards: this process itself, or worker processes; with the library that proved right."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from types import TracebackType

from pretrainkit.data.encoder import Encoder, EngineSpec, has_fastokens, load_encoder, one_thread
from pretrainkit.data.proof import Question, ask, first_difference
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
        if self.count > 1:
            self._start_pool()
        if self.engine == "fastokens" and self.count > 1 and self._plan.request.verify_tokens == "off":
            return self
        encoder = self._proven_encoder() if self.engine == "fastokens" else None
        if self.engine == "fastokens" and encoder is None:
            self.engine = "tokenizers"
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
                self._start_pool()
        if self.count == 1:
            self._encoder = ShardEncoder(self._setup(), encoder or load_encoder(self._spec(self.engine)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _start_pool(self) -> None:
        context = get_context("spawn")  # nothing with threads may be forked
        self._pool = ProcessPoolExecutor(self.count, context, start_worker, (self._setup(), self._spec(self.engine)))
        for _ in range(self.count):
            self._pool.submit(warm_up)  # they load the tokenizer while this process proves it

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

    def _proven_encoder(self) -> Encoder | None:
        """fastokens, if it gives the ids of tokenizers on hard strings and a sample of these shards' input."""
        plan = self._plan
        try:
            fast = load_encoder(self._spec("fastokens"))
        except Exception as error:  # whatever a Rust library thinks of a tokenizer
            LOGGER.warning("fastokens is not used, tokenizers encodes instead (slower): %s", error)
            return None
        if plan.request.verify_tokens == "off":
            return fast
        units = [unit for number in self._shard_ids for unit in plan.units(number)]
        question = Question.about(plan.tokenizer.special_tokens, plan.sources, units, plan.rules)
        difference = first_difference(fast, ask(load_encoder(self._spec("tokenizers")), question.texts()))
        if difference:
            LOGGER.warning("fastokens is not used, tokenizers encodes instead (slower): %s", difference)
            return None
        LOGGER.info("fastokens gives the ids of tokenizers on hard strings and a sample of this input")
        return fast

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
