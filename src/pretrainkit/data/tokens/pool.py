"""The worker processes: started before anything that must not be forked, and watched, so that none dies unseen."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from pretrainkit.data.indexed.results import Failure
from pretrainkit.data.tokens.encoder import EngineSpec
from pretrainkit.data.tokens.parity import Answers, ParitySample
from pretrainkit.data.tokens.template import run_reference, run_template
from pretrainkit.data.tokens.worker import Setup
from pretrainkit.errors import DataError

NOT_FORKABLE = ("tokenizers", "fastokens", "torch", "pyarrow")
"""Modules that may have started threads of their own, which don't live on in a forked process."""
GRACE_S = 4.0
"""A process whose connection ended is given this long to end itself."""
TEMPLATE, REFERENCE = -1, -2
"""Stand for the processes that are no workers, where a worker's number is given."""
NAMES = {TEMPLATE: "the process that loads the tokenizer", REFERENCE: "the process that proves the ids"}


def is_forkable() -> bool:
    """Whether this process may be forked: no threads of Python, nor of a library that is known to have some."""
    return threading.active_count() == 1 and not any(name in sys.modules for name in NOT_FORKABLE)


class WorkerDied(DataError):
    """A process ended without being told to."""


@contextlib.contextmanager
def _one_numpy_thread() -> Iterator[None]:
    """Keep numpy, which a spawned process imports, from starting threads: that process forks."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class WorkerPool:
    """Workers that each serve one connection, and the two processes of `template`.

    Use as a context: entering it forks, leaving it ends them all.
    """

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._workers: list[Connection] = []
        self._processes: dict[int, Any] = {}
        self._worker_processes: list[int] = []

    def __enter__(self) -> WorkerPool:
        forkable = is_forkable()
        context: Any = multiprocessing.get_context("fork" if forkable else "spawn")
        pipes = [context.Pipe() for _ in range(self._max_workers + 2)]
        (template, template_end), (reference, reference_end), *workers = pipes
        self._workers = [ours for ours, _ in workers]
        ends: list[Connection] = [theirs for _, theirs in workers]
        self._special: dict[int, Connection] = {TEMPLATE: template, REFERENCE: reference}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        ours = [*self._workers, template, reference] if forkable else []
        gc.freeze()  # the collector need not touch, and so copy, pages that are shared from here on
        for number, target, arguments in (
            (TEMPLATE, run_template, (template_end, ends, [*ours, *([reference_end] if forkable else [])])),
            (REFERENCE, run_reference, (reference_end, [*ours, *([template_end, *ends] if forkable else [])])),
        ):
            process = context.Process(target=target, args=arguments, name=NAMES[number], daemon=True)
            with _one_numpy_thread() if not forkable else contextlib.nullcontext():
                process.start()
            self._processes[number] = process
        for end in (template_end, reference_end, *ends):
            end.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __len__(self) -> int:
        return len(self._workers)

    def load(self, engine: EngineSpec) -> None:
        """Begin to load a tokenizer, in advance of `start`."""
        self._send(TEMPLATE, ("load", engine))

    def load_reference(self, engine: EngineSpec) -> None:
        """Begin to load what the proof needs, in advance of `ask`."""
        self._send(REFERENCE, ("load", engine))

    def start(self, setup: Setup, count: int) -> None:
        """Let `count` workers begin, as soon as the tokenizer is loaded; they may be sent to at once.

        When it can't be loaded, `wait` gives a `failed`.
        """
        for connection in self._workers[count:]:
            connection.close()
        del self._workers[count:]
        self._send(TEMPLATE, ("start", setup, count))

    def ask(self, engine: EngineSpec, question: ParitySample) -> None:
        """Have Hugging Face tokenizers asked; `wait` gives the `answers`."""
        self._send(REFERENCE, ("ask", engine, question))

    def send(self, worker: int, *message: Any, data: bytes | None = None) -> None:
        """Give a waiting worker a message, and bytes that go with it."""
        self._send(worker, message)
        if data is not None:
            with self._watched(worker):
                self._workers[worker].send_bytes(data)

    def _send(self, number: int, message: tuple[Any, ...]) -> None:
        with self._watched(number):
            self._connection(number).send(message)

    def _connection(self, number: int) -> Connection:
        return self._workers[number] if number >= 0 else self._special[number]

    @contextlib.contextmanager
    def _watched(self, number: int) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise self._died(number) from None

    def wake(self) -> None:
        """Make `wait` return; may be called by any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes it anyway
            os.write(self._wake_write, b"x")

    def wait(self, timeout_s: float) -> Iterator[tuple[int, str, Any]]:
        """Answers that have come: worker (or TEMPLATE, REFERENCE), kind and content. Raises WorkerDied."""
        numbers: dict[Any, int] = {connection: number for number, connection in self._special.items()}
        numbers |= {connection: number for number, connection in enumerate(self._workers)}
        # The template comes first: when it has died or failed, that is what the workers suffer from.
        for ready in sorted(wait([*numbers, self._wake_read], timeout_s), key=lambda one: numbers.get(one, 0)):
            if ready == self._wake_read:
                os.read(self._wake_read, 4096)
                continue
            number = numbers[ready]
            with self._watched(number):
                kind, content = self._connection(number).recv()
            if number == REFERENCE:
                self._end(REFERENCE)  # it is asked once, and holds memory
            if kind == "started":
                self._worker_processes = content
            else:
                yield number, kind, content

    def _died(self, number: int) -> WorkerDied:
        if number >= 0:
            code, process = self._exit_code(number)
        else:
            self._processes[number].join(GRACE_S)
            code, process = self._processes[number].exitcode, self._processes[number].pid
        how = "has ended" if code is None else f"exited ({code})"
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        hint = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
        return WorkerDied(
            f"{NAMES.get(number, f'worker {number}')} (process {process}) {how}{hint}",
            action="run the same command again: finished pieces are kept; with fewer --workers if memory was short",
        )

    def _exit_code(self, worker: int) -> tuple[int, int]:
        """How a worker ended, and its process id: the template, its parent, knows."""
        template = self._special[TEMPLATE]
        with contextlib.suppress(EOFError, OSError):
            template.send(("status", worker))
            while template.poll(GRACE_S):
                kind, content = template.recv()
                if kind == "started":
                    self._worker_processes = content
                elif kind == "status":
                    return content, self._worker_processes[worker]
        raise self._died(TEMPLATE)

    def _end(self, number: int) -> None:
        """Let go of one of the special processes."""
        self._special.pop(number).close()
        process = self._processes.pop(number)
        process.kill()
        process.join()

    def kill(self) -> None:
        """End all processes at once. What they had not reported is lost, nothing else."""
        for connection in self._workers:
            connection.close()
        self._workers = []
        if REFERENCE in self._processes:
            self._end(REFERENCE)
        template = self._processes.get(TEMPLATE)
        if template is None:
            return
        if self._worker_processes:
            self._special[TEMPLATE].close()  # at that it ends the workers and itself
            template.join(GRACE_S)
            if template.exitcode != 0:
                for process in self._worker_processes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
            self._worker_processes = []
        self._end(TEMPLATE)


class Reference:
    """A process that holds Hugging Face tokenizers and is asked once what that library gives."""

    def __init__(self, engine: EngineSpec, question: ParitySample) -> None:
        forkable = is_forkable()
        context: Any = multiprocessing.get_context("fork" if forkable else "spawn")
        self._connection, theirs = context.Pipe()
        inherited = [self._connection] if forkable else []
        self._process = context.Process(
            target=run_reference, args=(theirs, inherited), name=NAMES[REFERENCE], daemon=True
        )
        with _one_numpy_thread() if not forkable else contextlib.nullcontext():
            self._process.start()
        theirs.close()
        self._connection.send(("ask", engine, question))

    def answers(self) -> Answers:
        """What it gives. Raises DataError when the input can't be read, or the process has died."""
        try:
            _, reply = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(GRACE_S)
            raise WorkerDied(
                f"{NAMES[REFERENCE]} ended ({self._process.exitcode})", action="run the same command again"
            ) from None
        if isinstance(reply, Failure):
            raise DataError(reply.found, where=reply.where, needed=reply.needed, action=reply.action)
        return reply

    def end(self) -> None:
        """Let go of it, answered or not."""
        self._connection.close()
        self._process.kill()
        self._process.join()
