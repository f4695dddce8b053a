"""Runs a preprocessing request: workers encode, results are put in order, outputs appear whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue

from pretrainkit.data.indexed.assembly import Assembly
from pretrainkit.data.indexed.encode import EncodeReply, IndexedTask
from pretrainkit.data.indexed.encoded_chunk import EncodedChunk
from pretrainkit.data.indexed.feeder import Feeder
from pretrainkit.data.indexed.manifest import Manifest
from pretrainkit.data.indexed.output import Output
from pretrainkit.data.indexed.progress import Progress
from pretrainkit.data.indexed.record import OutputRecorder
from pretrainkit.data.indexed.request import Plan, Request, check_outputs, is_written, make_plan
from pretrainkit.data.indexed.state_folder import StateFolder, num_finished_outputs, remove_finished
from pretrainkit.data.tokens import encoder
from pretrainkit.data.tokens.encode_pool import ITEMS_AHEAD, EncodePool
from pretrainkit.data.tokens.parity import EnginesDiffer, ParitySample
from pretrainkit.data.tokens.tokenizer import TokenizerFile
from pretrainkit.errors import DataError, RequestError
from pretrainkit.logs import get_logger
from pretrainkit.signals import stopped_by_signals

LOGGER = get_logger(__name__)


def preprocess(request: Request) -> list[Manifest]:
    """Write the pairs, manifests and rejects that a request asks for; gives the manifests.

    Raises RequestError before any work, DataError when an input is bad or the machine fails, StoppedError on SIGTERM
    and Ctrl-C. After the last two, the same request continues where it was.
    """
    with EncodePool(request.workers) as pool:  # first of all: nothing here must have threads before the fork
        return preprocess_with(pool, request)


def preprocess_with(pool: EncodePool, request: Request, tokenizer: TokenizerFile | None = None) -> list[Manifest]:
    """The same with a pool that was entered earlier, which is closed, and a tokenizer.json that was read already."""
    _load_early(request, pool)
    plan = make_plan(request, tokenizer)
    identity = plan.identity()
    if remove_finished(plan.state_folder) and is_written(plan):
        LOGGER.info("all of it is written already")
        return OutputRecorder(plan, "").manifests()
    num_finished = num_finished_outputs(plan.state_folder, identity)
    is_all = num_finished == len(plan.outputs)
    check_outputs(plan, num_finished if request.resume or is_all else 0)
    try:
        state = StateFolder(plan.state_folder, identity, resume=request.resume or is_all)
    except OSError as error:
        raise RequestError(
            f"can't be written: {error.strerror}",
            where=str(plan.state_folder),
            action="give another --output-prefix",
        ) from error
    with _machine_errors(plan.state_folder):
        try:
            with stopped_by_signals("run the same command again: it continues where it was"):
                manifests = _with_best_engine(plan, state, pool)
        except BaseException:
            pool.close()  # before others may continue this work
            state.close()
            raise
        state.remove()
    pool.close()
    if not any(manifest.num_documents for manifest in manifests):
        LOGGER.warning("no document was written")
    return manifests


@contextmanager
def _machine_errors(state_folder: Path) -> Iterator[None]:
    """Report a full disk and its like as an error of ours."""
    try:
        yield
    except OSError as error:
        raise DataError(
            error.strerror or str(error),
            where=str(error.filename or state_folder),
            action=f"fix it and run the same command again: finished pieces are kept in {state_folder}",
        ) from error


def _load_early(request: Request, pool: EncodePool) -> None:
    """Load the tokenizer, a second for a large one, while the request is checked."""
    path = Path(request.tokenizer_model) / "tokenizer.json"
    if path.is_file():
        name = "tokenizers" if request.engine == "tokenizers" else encoder.default_engine()
        pool.load(
            request.engine_spec(name, path), with_reference=name == "fastokens" and request.verify_tokens != "off"
        )


def _with_best_engine(plan: Plan, state: StateFolder, pool: EncodePool) -> list[Manifest]:
    engine = plan.request.engine
    if engine == "auto":
        # A run that had to take tokenizers is continued with it, or it would lose its work again and again.
        engine = state.journal.engine or encoder.default_engine()
    try:
        return _Run(plan, state, pool, engine).run()
    except EnginesDiffer as difference:
        LOGGER.warning("fastokens is not used, tokenizers encodes instead (slower): %s", difference)
    pool.stop()  # first: a worker could still write a part file
    state.reset("tokenizers")
    return _Run(plan, state, pool, "tokenizers").run()


class _Run:
    """One attempt with one engine."""

    def __init__(self, plan: Plan, state: StateFolder, pool: EncodePool, engine: str) -> None:
        self.plan, self.state, self.pool = plan, state, pool
        self.engine = plan.request.engine_spec(engine, plan.tokenizer.json_path)
        self.recorder = OutputRecorder(plan, engine)
        self.is_proven = engine != "fastokens" or plan.request.verify_tokens == "off"
        self.first_line = cache(plan.first_line)
        outputs = [
            Output(plan.state_folder, number, names.prefixes, names.rejects, plan.dtype, self.locate)
            for number, names in enumerate(plan.outputs)
        ]
        self.events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """What other threads have this one do."""
        self.assembly = Assembly(state, plan.items, outputs, self.recorder.finish, pool.submit, self.wake)
        self.num_in_hand = 0
        self.bad: list[EncodedChunk] = []

    def wake(self) -> None:
        """Have the loop look again what can go on; may be called by any thread."""
        self.events.put(lambda: None)

    def locate(self, source: int, line: int) -> tuple[str, int]:
        """The path of a source, and the number in it of a line that is counted from where this run begins."""
        return self.plan.sources[source].path, self.first_line(source) + line + 1

    def run(self) -> list[Manifest]:
        """Do what is left to do. Raises EnginesDiffer."""
        if self.state.is_resumed:
            self.assembly.resume()
            if self.assembly.is_complete:
                LOGGER.info("all of it was finished before")
                return self.recorder.manifests()
            LOGGER.info("continuing unfinished work: %d pieces are done", len(self.assembly.done))
        self._start_workers()
        plan, assembly = self.plan, self.assembly
        remaining = assembly.remaining()
        self.feeder = Feeder(remaining, plan.sources, plan.rules, assembly.done, len(self.pool), self.wake)
        self.progress = Progress(plan, remaining)
        try:
            self._serve()
            self._report_bad_record()
            assert self.assembly.is_complete, "work ended before its outputs"
        finally:
            self.progress.close()
            self.feeder.stop()
            self.assembly.close()
        return self.recorder.manifests()

    def _start_workers(self) -> None:
        plan, request = self.plan, self.plan.request
        task = IndexedTask(
            sources=plan.sources,
            folder=plan.state_folder,
            special_tokens=plan.tokenizer.special_tokens,
            special_tokens_in_text=request.special_tokens_in_text,
            num_ids=plan.tokenizer.num_ids,
            rules=plan.rules,
            stop_on_bad_record=request.on_error == "stop",
            dtype=plan.dtype.name,
            bos_id=plan.bos_id,
            eod_id=plan.eod_id,
        )
        sample = None
        if not self.is_proven:
            items = [*plan.items.values()]
            sample = ParitySample.about(plan.tokenizer.special_tokens, plan.sources, items, plan.rules)
        comparison = self.pool.start(task, self.engine, plan.useful_workers(), sample)
        if sample is not None:
            # Compared while the work goes on; no output is finished before the result.
            comparison.add_done_callback(lambda done: self.events.put(partial(self._take_comparison, done)))

    def _serve(self) -> None:
        while True:
            self._hand_out()
            self.assembly.advance(may_finish=self.is_proven)
            is_busy = self.num_in_hand or not self.feeder.is_exhausted or not self.assembly.is_idle
            if not is_busy and self.is_proven:
                return
            self.events.get()()

    def _hand_out(self) -> None:
        num_workers = len(self.pool)
        while self.num_in_hand < ITEMS_AHEAD * num_workers:
            request = self.feeder.next(may_be_block=self.num_in_hand <= num_workers)
            if request is None:
                return
            self.num_in_hand += 1
            reply = self.pool.submit(request)
            reply.add_done_callback(lambda done: self.events.put(partial(self._take_reply, done)))

    def _take_reply(self, done: Future[EncodeReply]) -> None:
        self.num_in_hand -= 1
        reply = done.result()
        if reply.chunk.bad:
            self.bad.append(reply.chunk)
            self.feeder.stop()
            return
        self.assembly.add(reply.chunk, reply.spilled)
        self.progress.add(reply.chunk)

    def _take_comparison(self, done: Future[str]) -> None:
        if difference := done.result():
            raise EnginesDiffer(difference)
        self.is_proven = True
        LOGGER.info(
            "fastokens %(fastokens)s gives the ids of tokenizers %(tokenizers)s on hard strings and a sample of this"
            " input",
            encoder.versions(),
        )

    def _report_bad_record(self) -> None:
        if not self.bad:
            return
        chunk = min(self.bad, key=lambda chunk: chunk.order)
        assert chunk.bad is not None
        number, record = chunk.bad
        line = self.assembly.lines_before(chunk, number) + record.line
        path, line_number = self.locate(chunk.ranges[number].source, line)
        raise DataError(
            record.found,
            where=f"{path}:{line_number}",
            action="fix the record, or set bad ones aside with --on-error skip; run again to continue from here",
        )
