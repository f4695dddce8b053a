"""Worker processes that encode text, whatever the output: .bin/.idx, tar shards or packed rows.

A fork server loads the tokenizer once and forks the workers, which share its memory. Each worker has a pipe of its own:
on a shared one, a worker that is killed in the middle of a send would block all others. How a sink uses the pool:

    class TarTask:                                  # picklable: everything that a worker needs to know
        def open(self, encoder: Encoder, worker: int) -> Callable[[Block], Piece]: ...    # called once in every worker

    with EncodePool(workers) as pool:               # first of all: it forks, so there must be no threads yet
        pool.load(engine)                           # optional: loading overlaps with what this process does next
        difference = pool.start(task, engine, workers, sample)  # raises EnginesDiffer if fastokens can't load it
        difference.result()                         # "" if fastokens gives the ids of tokenizers
        for block, piece in pool.ordered(blocks):   # replies in the order of the items; `submit` gives futures
            ...

After EnginesDiffer, or a difference, `start` again with the engine `tokenizers`. What a worker raises (errors of ours,
OSError, EnginesDiffer) is raised where its reply is taken; so is WorkerDied. Leaving the context ends all processes.
They ignore SIGINT and SIGTERM, which schedulers send to all processes of a job: the parent decides what those mean.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from pretrainkit.data.tokens import gguf
from pretrainkit.data.tokens.encoder import Encoder, EngineSpec, num_threads, one_thread
from pretrainkit.data.tokens.parity import (
    Answers,
    EnginesDiffer,
    ParitySample,
    ask,
    first_difference,
    load_checked_encoder,
)
from pretrainkit.errors import DataError, PretrainkitError
from pretrainkit.logs import get_logger
from pretrainkit.signals import die_with_parent

log = get_logger(__name__)

NOT_FORKABLE = ("tokenizers", "fastokens", "torch", "pyarrow")
"""Modules that may have started threads, which don't survive in a forked process."""
NUM_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
ITEMS_AHEAD = 2
"""Items to submit for each worker: bounds memory, and no worker waits for its next item."""
GRACE_S = 4.0
"""Time for the fork server to end its children and itself before it is killed."""
FORK_SERVER, REFERENCE = "the process that loads the tokenizer", "the process that proves the ids"
Item = TypeVar("Item")
Opener: TypeAlias = Callable[[Encoder | None], Callable[[Any], Any]]
"""Gives a child's function from item to reply, for the tokenizer that the fork server has loaded."""


class EncodeTask(Protocol):
    """What the workers of a sink do; it is pickled once."""

    def open(self, encoder: Encoder, worker: int) -> Callable[[Any], Any]:
        """The function that turns an item into a reply, both picklable. Called once in every worker."""


class WorkerDied(DataError):
    """A process exited unexpectedly."""


class _Child:
    """A process that the fork server has forked, the pipe to it, and requests that only it can answer."""

    def __init__(self, name: str, pid: int, connection: Connection) -> None:
        self.name, self.pid, self.connection = name, pid, connection
        self.requests: deque[tuple[Any, Future[Any]]] = deque()
        self.thread: threading.Thread | None = None


class EncodePool:
    """Up to `max_workers` processes that encode. Use as a context; the module's docstring shows how."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._workers: list[_Child] = []
        self._reference: _Child | None = None
        self._requests: deque[tuple[Any, Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._server_lock = threading.RLock()

    def __enter__(self) -> EncodePool:
        is_forkable = threading.active_count() == 1 and not any(name in sys.modules for name in NOT_FORKABLE)
        context: Any = multiprocessing.get_context("fork" if is_forkable else "spawn")
        self._server, theirs = context.Pipe()
        inherited = [self._server] if is_forkable else []
        gc.freeze()  # the collector doesn't touch, and so copy, pages that are shared from here on
        self._process = context.Process(target=_serve_forks, args=(theirs, inherited), name=FORK_SERVER, daemon=True)
        environment = dict(os.environ)
        os.environ.update(dict.fromkeys(NUM_THREADS, "1"))  # numpy, which a spawned process imports, may start none
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(environment)
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Number of workers: those that were started, else those that may be."""
        return len(self._workers) or self._max_workers

    def load(self, engine: EngineSpec) -> None:
        """Begin to load a tokenizer in advance of `start`."""
        with self._watching_server():
            _send(self._server, ("load", engine))

    def load_reference(self, engine: EngineSpec) -> None:
        """Begin to load what comparing a sample needs."""
        self._reference = self._fork(REFERENCE, partial(_open_reference, engine.reference))

    def ask_reference(self, engine: EngineSpec, sample: ParitySample) -> Future[Answers]:
        """The ids that Hugging Face tokenizers gives, asked in a process of its own, which then ends.

        The future raises DataError when the sample can't be read.
        """
        if self._reference is None:
            self.load_reference(engine)
        answers: Future[Answers] = Future()
        arguments = self._reference, sample, answers
        threading.Thread(target=self._ask, args=arguments, name=REFERENCE, daemon=True).start()
        self._reference = None
        return answers

    def start(
        self, task: EncodeTask, engine: EngineSpec, count: int, sample: ParitySample | None = None
    ) -> Future[str]:
        """Load the tokenizer and fork `count` workers, in place of those of an earlier `start`.

        The future says, in words, where the workers' ids of a sample differ from those of Hugging Face tokenizers,
        which are asked while the tokenizer loads; empty if nowhere. It raises DataError when the sample can't be read.
        Raises EnginesDiffer when fastokens can't load the tokenizer, DataError when tokenizers can't.
        """
        self.stop()
        answers = None if sample is None else self.ask_reference(engine, sample)
        self._ask_server("check", engine)
        for number in range(min(count, self._max_workers)):
            self._workers.append(self._fork(f"worker {number}", partial(_open_worker, task, number)))
        for worker in self._workers:
            worker.thread = threading.Thread(target=self._serve_worker, args=(worker,), name=worker.name, daemon=True)
            worker.thread.start()
        difference: Future[str] = Future()
        if answers is None:
            difference.set_result("")
        else:
            answers.add_done_callback(partial(self._compare, difference))
        return difference

    def stop(self) -> None:
        """End the workers; replies that were not taken are lost."""
        if self._workers:
            self._ask_server("stop", [worker.pid for worker in self._workers])
            self._end_threads()

    def submit(self, item: Any, worker: int | None = None) -> Future[Any]:
        """Have the next idle worker answer, or a certain one as soon as it is idle."""
        future: Future[Any] = Future()
        with self._changed:
            (self._requests if worker is None else self._workers[worker].requests).append((item, future))
            self._changed.notify_all()
        return future

    def ordered(self, items: Iterable[Item]) -> Iterator[tuple[Item, Any]]:
        """Every item with its reply, in order."""
        waiting: deque[tuple[Item, Future[Any]]] = deque()

        def first() -> tuple[Item, Any]:  # nothing here keeps a reply that was given out
            item, future = waiting.popleft()
            return item, future.result()

        for item in items:
            waiting.append((item, self.submit(item)))
            if len(waiting) >= ITEMS_AHEAD * len(self._workers):
                yield first()
        while waiting:
            yield first()

    def close(self) -> None:
        """End all processes at once. Replies that were not taken are lost, nothing else."""
        if self._server.closed:
            return
        self._server.close()  # the fork server then ends its children and itself
        self._process.join(GRACE_S)
        self._process.kill()  # its children die with it
        self._process.join()
        self._end_threads()

    def _end_threads(self) -> None:
        """Requires that the workers have ended: their threads' calls return at that."""
        with self._changed:
            self._is_stopping = True
            self._requests.clear()
            self._changed.notify_all()
        for worker in self._workers:
            if worker.thread is not None:
                worker.thread.join()
            worker.connection.close()
        self._workers, self._is_stopping = [], False

    def _serve_worker(self, worker: _Child) -> None:
        while True:
            with self._changed:
                while not (self._is_stopping or worker.requests or self._requests):
                    self._changed.wait()
                if self._is_stopping:
                    return
                item, future = (worker.requests or self._requests).popleft()
            try:
                self._send(worker, item)
                del item  # an item and a reply may be large, and the next request far away
                future.set_result(self._receive(worker))
            except Exception as error:
                future.set_exception(error)
            del future

    def _ask(self, reference: _Child, sample: ParitySample, answers: Future[Answers]) -> None:
        try:
            self._send(reference, sample)
            reply = self._receive(reference)
            reference.connection.close()
            self._ask_server("stop", [reference.pid])  # its tokenizer is not needed again
            if reply.note:
                log.info("%s", reply.note)
            answers.set_result(reply)
        except Exception as error:
            answers.set_exception(error)

    def _compare(self, difference: Future[str], answers: Future[Answers]) -> None:
        try:
            difference.set_result(self.submit(answers.result()).result())
        except Exception as error:
            difference.set_exception(error)

    def _send(self, child: _Child, item: Any) -> None:
        with self._watching(child):
            _send(child.connection, item)

    def _receive(self, child: _Child) -> Any:
        with self._watching(child):
            reply = child.connection.recv()
        if isinstance(reply, Exception):
            raise reply
        return reply

    @contextlib.contextmanager
    def _watching(self, child: _Child) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError):
            if self._server.closed:
                raise
            raise _died(child.name, child.pid, self._ask_server("wait", child.pid)) from None

    def _fork(self, name: str, task: Any) -> _Child:
        with self._server_lock, self._watching_server():  # the pipe comes after the reply: no other may be between
            pid = self._ask_server("fork", task)
            return _Child(name, pid, Connection(reduction.recv_handle(self._server)))

    def _ask_server(self, kind: str, content: Any) -> Any:
        with self._server_lock, self._watching_server():
            _send(self._server, (kind, content))
            reply = self._server.recv()
        if isinstance(reply, Exception):
            raise reply
        return reply

    @contextlib.contextmanager
    def _watching_server(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(GRACE_S)
            raise _died(FORK_SERVER, self._process.pid, self._process.exitcode) from None


def _died(name: str, pid: int | None, code: int | None) -> WorkerDied:
    how = "has ended" if code is None else f"exited ({code})"
    if code is not None and code < 0:
        how = f"was killed by signal {-code} ({signal.Signals(-code).name})"
    hint = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
    return WorkerDied(
        f"{name} (process {pid}) {how}{hint}",
        action="run the same command again, with fewer --workers if memory was short",
    )


def _serve_forks(connection: Connection, inherited: Iterable[Connection]) -> None:
    """The fork server: answer requests until the parent exits, then end all children.

    `inherited` are the parent's connections, which would never end if this process kept them open.
    """
    for other in inherited:
        other.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    one_thread()
    server = _ForkServer(connection)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            kind, content = connection.recv()
            getattr(server, kind)(content)
    with contextlib.suppress(OSError):  # there is nobody to reply to
        server.stop(list(server.children))


class _ForkServer:
    """Loads a tokenizer and forks processes that have it. Its public methods are the requests that it serves."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._engine: EngineSpec | None = None
        self._encoder: Encoder | None = None
        self._error: Exception | None = None
        self.children: set[int] = set()
        """Process ids."""

    def load(self, engine: EngineSpec) -> None:
        """Load a tokenizer, unless it is the one that is loaded. `check` reports errors."""
        if engine == self._engine:
            return
        self._engine, self._encoder, self._error = engine, None, None
        try:
            self._encoder = load_tokenizer(engine)
            if num_threads() > 1:
                self._error = EnginesDiffer(f"{engine.name} has started threads, which don't survive in workers")
        except (EnginesDiffer, DataError) as error:
            self._error = error

    def check(self, engine: EngineSpec) -> None:
        """Reply with None once a tokenizer is loaded, or with what is wrong with it."""
        self.load(engine)
        _send(self._connection, self._error)

    def fork(self, opener: Opener) -> None:
        """Fork a child; reply with its process id and the parent's end of a pipe to it."""
        ours, theirs = multiprocessing.Pipe()
        gc.freeze()
        server = os.getpid()
        pid = os.fork()
        if not pid:
            self._connection.close()
            ours.close()
            die_with_parent()  # a killed fork server takes its children along
            if os.getppid() == server:
                _run_child(theirs, opener, self._encoder)
            os._exit(1)
        self.children.add(pid)
        theirs.close()
        _send(self._connection, pid)
        reduction.send_handle(self._connection, ours.fileno(), os.getppid())
        ours.close()

    def wait(self, pid: int) -> None:
        """Reply with the exit code of a child that has ended; negative: the signal."""
        self.children.discard(pid)
        with contextlib.suppress(ChildProcessError):
            _send(self._connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return
        self._connection.send(None)  # another request has asked for it

    def stop(self, pids: list[int]) -> None:
        """Kill children; reply once they have ended."""
        for pid in self.children & set(pids):
            os.kill(pid, signal.SIGKILL)
        for pid in self.children & set(pids):
            os.waitpid(pid, 0)
        self.children -= set(pids)
        _send(self._connection, None)


def load_tokenizer(engine: EngineSpec) -> Encoder:
    """Load a tokenizer. Raises EnginesDiffer when fastokens can't, DataError when tokenizers can't."""
    try:
        return load_checked_encoder(engine)
    except Exception as error:  # the Rust libraries raise errors of many kinds
        found = f"{engine.name} does not load this tokenizer: {error}"
        if engine.name == "fastokens":
            raise EnginesDiffer(found) from error
        action = "fix tokenizer.json, or update the package tokenizers"
        raise DataError(found, where=engine.json_path, action=action) from error


def _open_worker(task: EncodeTask, number: int, encoder: Encoder | None) -> Callable[[Any], Any]:
    """What a worker does: the sink's task, and comparing the ids of a sample."""
    assert encoder is not None, "a worker was forked before its tokenizer was loaded"
    encode = task.open(encoder, number)
    return lambda item: first_difference(encoder, item) if isinstance(item, Answers) else encode(item)


def _open_reference(engine: EngineSpec, _: Encoder | None) -> Callable[[ParitySample], Answers]:
    """What the reference does: say which ids Hugging Face tokenizers gives."""
    encoder = load_tokenizer(engine)
    note = gguf.unknown_note(gguf.ids_with_template(encoder, Path(engine.json_path)))
    return lambda sample: replace(ask(encoder, sample.texts()), note=note)


def _run_child(connection: Connection, opener: Opener, encoder: Encoder | None) -> None:
    """Reply to every item until the parent closes the pipe."""
    try:
        reply_to = _result(opener, encoder)
        while True:
            item = connection.recv()
            reply = reply_to if isinstance(reply_to, Exception) else _result(reply_to, item)
            del item
            _send(connection, reply)
            del reply
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has closed the pipe, or was killed
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()


def _send(connection: Connection, item: Any) -> None:
    """As Connection.send, whose buffer Python 3.12 crashes on at exit when the other end is killed in the middle."""
    connection.send_bytes(bytes(reduction.ForkingPickler.dumps(item)))


def _result(function: Callable[[Any], Any], argument: Any) -> Any:
    """What a function returns, or raises if it is an error for the parent."""
    try:
        return function(argument)
    except (PretrainkitError, OSError, EnginesDiffer) as error:
        return error
    except MemoryError:
        return out_of_memory()


def out_of_memory() -> DataError:
    """What a worker that has no memory left replies."""
    return DataError("out of memory", action="use fewer --workers, or set --max-doc-bytes")
