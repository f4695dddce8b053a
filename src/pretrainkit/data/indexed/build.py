"""Runs a preprocessing request: workers encode, results are put in order, outputs appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrainkit.data.indexed.assembly import Assembly
from pretrainkit.data.indexed.feeder import BlockTask, Feeder, UnitTask
from pretrainkit.data.indexed.journal import Journal, clear_done, finished_outputs
from pretrainkit.data.indexed.manifest import Manifest
from pretrainkit.data.indexed.output import Output
from pretrainkit.data.indexed.progress import Progress
from pretrainkit.data.indexed.record import OutputRecorder
from pretrainkit.data.indexed.request import Plan, Request, check_outputs, is_written, make_plan
from pretrainkit.data.indexed.results import BadRecord, ChunkResult, Difference, Failure
from pretrainkit.data.tokens import encoder
from pretrainkit.data.tokens.encoder import EngineSpec
from pretrainkit.data.tokens.parity import ParitySample
from pretrainkit.data.tokens.pool import WorkerPool
from pretrainkit.data.tokens.tokenizer import TokenizerFile
from pretrainkit.data.tokens.worker import Setup
from pretrainkit.errors import DataError, RequestError
from pretrainkit.logs import get_logger
from pretrainkit.signals import stopped_by_signals

LOGGER = get_logger(__name__)
TASKS_AHEAD = 2
"""Units a worker has in hand, so that it never waits for the parent."""


class _EnginesDiffer(Exception):
    """fastokens can't be used for this tokenizer or input."""


def preprocess(request: Request) -> list[Manifest]:
    """Write the pairs, manifests and rejects that a request asks for; gives the manifests.

    Raises RequestError before any work, DataError when an input is bad or the machine fails, StoppedError on SIGTERM
    and Ctrl-C. After the last two, the same request continues where it was.
    """
    with WorkerPool(request.workers) as pool:  # first of all: nothing here must have threads before the fork
        return preprocess_with(pool, request)


def preprocess_with(pool: WorkerPool, request: Request, tokenizer: TokenizerFile | None = None) -> list[Manifest]:
    """The same with processes that were forked earlier, which it ends, and a tokenizer.json that was read already."""
    _load_early(request, pool)
    plan = make_plan(request, tokenizer)
    identity = plan.identity()
    if clear_done(plan.state_folder) and is_written(plan):
        LOGGER.info("all of it is written already")
        return OutputRecorder(plan, "").manifests()
    finished = finished_outputs(plan.state_folder, identity)
    is_all = finished == len(plan.outputs)
    check_outputs(plan, finished if request.resume or is_all else 0)
    try:
        journal = Journal(plan.state_folder, identity, resume=request.resume or is_all)
    except OSError as error:
        raise RequestError(
            f"can't be written: {error.strerror}",
            where=str(plan.state_folder),
            action="give another --output-prefix",
        ) from error
    with _machine_errors(plan.state_folder):
        try:
            with stopped_by_signals("run the same command again: it continues where it was"):
                manifests = _with_best_engine(plan, journal, pool)
        except BaseException:
            journal.close()
            raise
        journal.remove()
    pool.kill()
    if not any(manifest.num_documents for manifest in manifests):
        LOGGER.warning("no document was written")
    return manifests


@contextmanager
def _machine_errors(state_folder: Path) -> Iterator[None]:
    """A full disk and its like, told as an error of ours."""
    try:
        yield
    except OSError as error:
        raise DataError(
            error.strerror or str(error),
            where=str(error.filename or state_folder),
            action=f"mend it and run the same command again: finished pieces are kept in {state_folder}",
        ) from error


def _load_early(request: Request, pool: WorkerPool) -> None:
    """Let the tokenizer be loaded, a second for a large one, while the request is checked."""
    path = Path(request.tokenizer_model) / "tokenizer.json"
    if path.is_file():
        fast = EngineSpec("fastokens", str(path), request.special_tokens_in_text != "plain")
        reference = replace(fast, name="tokenizers")
        is_fast = request.engine == "auto" and encoder.has_fastokens()
        pool.load(fast if is_fast else reference)
        if is_fast and request.verify_tokens != "off":
            pool.load_reference(reference)


def _with_best_engine(plan: Plan, journal: Journal, pool: WorkerPool) -> list[Manifest]:
    engine = plan.request.engine
    if engine == "auto":
        # A run that had to take tokenizers is continued with it, or it would lose its work again and again.
        engine = journal.state.engine or ("fastokens" if encoder.has_fastokens() else "tokenizers")
    try:
        return _Run(plan, journal, pool, engine).run()
    except _EnginesDiffer as difference:
        LOGGER.warning("fastokens is not used, tokenizers encodes instead (slower): %s", difference)
    pool.kill()
    journal.reset(plan.identity())
    journal.add_engine("tokenizers")
    with WorkerPool(plan.request.workers) as fresh:
        return _Run(plan, journal, fresh, "tokenizers").run()


class _Run:
    """One attempt with one engine."""

    def __init__(self, plan: Plan, journal: Journal, pool: WorkerPool, engine: str) -> None:
        self.plan, self.journal, self.pool, self.engine = plan, journal, pool, engine
        self.recorder = OutputRecorder(plan, engine)
        before = self.recorder.lines_before_shard
        outputs = [
            Output(plan.state_folder, number, names.prefixes, names.rejects, plan.dtype, before)
            for number, names in enumerate(plan.outputs)
        ]
        names = [source.path for source in plan.sources]
        self.assembly = Assembly(journal, plan.units, outputs, names, self.recorder.finish, pool.send, pool.wake)
        self.bad: list[BadRecord] = []
        self.in_hand: list[int] = []
        self.held: BlockTask | UnitTask | None = None

    def run(self) -> list[Manifest]:
        if self.journal.is_resumed:
            self.assembly.resume()
            if self.assembly.is_complete:
                LOGGER.info("all of it was finished before")
                return self.recorder.manifests()
            LOGGER.info("continuing unfinished work: %d pieces are done", len(self.assembly.done))
        self._start_workers()
        self.feeder = Feeder(
            self.plan.units,
            self.plan.sources,
            self.assembly.done.copy(),
            self.assembly.stream_ends(),
            len(self.pool),
            self.pool.wake,
            self.assembly.end_stream,
        )
        self.progress = Progress(self.plan, self.assembly.done)
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
        is_special = request.special_tokens_in_text != "plain"
        setup = Setup(
            engine=EngineSpec(self.engine, str(plan.tokenizer.json_path), is_special),
            verify_all=request.verify_tokens == "all",
            sources=plan.sources,
            folder=plan.state_folder,
            name=f"session{self.journal.session}.{self.engine}.worker",
            special_tokens=plan.tokenizer.special_tokens,
            special_tokens_in_text=request.special_tokens_in_text,
            num_ids=plan.tokenizer.num_ids,
            rules=plan.rules,
            stop_on_bad_record=request.on_error == "stop",
            dtype=plan.dtype.name,
            bos_id=plan.bos_id,
            eod_id=plan.eod_id,
        )
        self.pool.start(setup, min(len(self.pool), plan.useful_workers()))
        self.in_hand = [0] * len(self.pool)
        if not self.recorder.is_proven:
            # Asked and compared beside the work; nothing is committed before the result.
            question = ParitySample.about(
                plan.tokenizer.special_tokens, plan.sources, [*plan.units.values()], plan.rules
            )
            self.pool.ask(replace(setup.engine, name="tokenizers"), question)

    def _serve(self) -> None:
        while True:
            self._hand_out()
            self.assembly.advance(may_finish=self.recorder.is_proven)
            is_busy = any(self.in_hand) or self.held is not None or not self.feeder.is_exhausted
            if not is_busy and self.assembly.is_idle and self.recorder.is_proven:
                return
            for worker, kind, content in self.pool.wait(0.5):
                if worker >= 0:
                    self.in_hand[worker] -= kind not in ("write", "spill")
                self._take(worker, kind, content)

    def _hand_out(self) -> None:
        while True:
            worker = min(range(len(self.in_hand)), key=self.in_hand.__getitem__)
            if self.in_hand[worker] >= TASKS_AHEAD:
                return
            task, self.held = self.held or self.feeder.next(), None
            if task is None:
                return
            if isinstance(task, UnitTask):
                self.pool.send(worker, "unit", task.number, task.unit)
            elif self.in_hand[worker]:  # a busy worker would not take the block's bytes now
                self.held = task
                return
            else:
                self.pool.send(worker, "block", task.unit, task.block, task.source, task.disk_bytes, data=task.data)
            self.in_hand[worker] += 1

    def _take(self, worker: int, kind: str, content: Any) -> None:
        if kind == "spill" and isinstance(content, ChunkResult):
            self.assembly.spilled(content)
        elif isinstance(content, ChunkResult):
            self.assembly.add(worker, content)
            self.progress.add(content)
        elif isinstance(content, BadRecord):
            self.bad.append(content)
            self.feeder.stop()
            self.held = None
        elif isinstance(content, Failure):
            raise DataError(
                content.found,
                where=content.where,
                needed=content.needed,
                action=content.action
                or f"mend it and run the same command again: finished pieces are kept in {self.plan.state_folder}",
            )
        elif isinstance(content, Difference):
            raise _EnginesDiffer(content.found)
        elif kind == "write":
            self.assembly.written(content)
        elif kind == "answers":
            self.pool.send(0, "compare", content)
            self.in_hand[0] += 1
        elif kind == "compare":
            self.recorder.is_proven = True
            LOGGER.info(
                "fastokens %(fastokens)s gives the ids of tokenizers %(tokenizers)s on hard strings and a sample of"
                " this input",
                encoder.versions(),
            )

    def _report_bad_record(self) -> None:
        if not self.bad:
            return
        first = min(self.bad, key=lambda bad: (bad.unit, bad.block))
        source = self.plan.sources[first.source]
        line = self.assembly.lines_before((first.unit, first.block), first.source) + first.line + 1
        line += self.recorder.lines_before_shard(first.source)
        raise DataError(
            first.found,
            where=f"{source.path}:{line}",
            action="mend the record, or set bad ones aside with --on-error skip; run again to continue from here",
        )
