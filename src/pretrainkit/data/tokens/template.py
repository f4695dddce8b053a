"""The process that loads the tokenizer, once, and forks the workers: they share its memory and its second of loading.

A second such process holds Hugging Face tokenizers and says what that library gives, for the proof.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection

from pretrainkit.data.indexed.results import Difference, Failure
from pretrainkit.data.tokens.encoder import Encoder, EngineSpec, load_encoder, num_threads, one_thread
from pretrainkit.data.tokens.parity import ParitySample, ask
from pretrainkit.data.tokens.worker import Encoders, Setup, serve
from pretrainkit.errors import DataError


def run_template(connection: Connection, workers: list[Connection], inherited: Iterable[Connection]) -> None:
    """Serve `load`, `start` and `status` until the parent is gone; then end all workers.

    Args:
        connection: to the parent.
        workers: the workers' ends of their connections, one each; as many are used as `start` says.
        inherited: ends that belong to others, closed at once.
    """
    _begin(inherited)
    loader = _Loader()
    processes: list[int] = []
    try:
        while True:
            kind, *details = connection.recv()
            if kind == "load":
                loader.load(details[0])
            elif kind == "start":
                setup, count = details
                try:
                    encoders = _encoders(loader, setup)
                except _Unusable as error:
                    connection.send(("failed", _failure(error, setup.engine)))
                    continue
                for other in workers[count:]:
                    other.close()
                gc.freeze()  # what is there now stays: the collector need not touch, and so copy, shared pages
                for number in range(count):
                    processes.append(_fork(connection, workers[:count], number, setup, encoders))
                for other in workers[:count]:
                    other.close()
                connection.send(("started", list(processes)))
            elif kind == "status":
                _, code = os.waitpid(processes[details[0]], 0)
                connection.send(("status", os.waitstatus_to_exitcode(code)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has let go of its end, or was killed
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for process in processes:
        with contextlib.suppress(ChildProcessError):  # its end was told before
            os.waitpid(process, 0)


def _begin(inherited: Iterable[Connection]) -> None:
    for other in inherited:
        other.close()
    # Ctrl-C and a scheduler's SIGTERM reach the whole group; the parent decides what then happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    one_thread()


def _fork(parent: Connection, workers: list[Connection], number: int, setup: Setup, encoders: Encoders) -> int:
    process = os.fork()
    if process:
        return process
    try:
        parent.close()
        for other in workers:
            if other is not workers[number]:
                other.close()
        serve(workers[number], setup, encoders, number)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    os._exit(1)


class _Unusable(Exception):
    """A library can't be used for this tokenizer."""


class _Loader:
    """The tokenizer that was loaded last."""

    def __init__(self) -> None:
        self._spec: EngineSpec | None = None
        self._encoder: Encoder | None = None
        self._error = ""

    def load(self, spec: EngineSpec) -> None:
        """Load, unless it is loaded; what is wrong with it is said by `get`."""
        if spec == self._spec:
            return
        self._spec, self._encoder, self._error = spec, None, ""
        try:
            self._encoder = load_encoder(spec)
        except Exception as error:  # whatever a Rust library thinks of a tokenizer
            self._error = f"{spec.name} does not load this tokenizer: {error}"

    def get(self, spec: EngineSpec) -> Encoder:
        """The loaded tokenizer; raises _Unusable."""
        self.load(spec)
        if self._encoder is None:
            raise _Unusable(self._error)
        return self._encoder


def _encoders(loader: _Loader, setup: Setup) -> Encoders:
    engine = setup.engine
    reference = None
    if setup.verify_all and engine.name == "fastokens":
        reference = _Loader().get(replace(engine, name="tokenizers"))
    encoders = Encoders(loader.get(engine), reference)
    if num_threads() > 1:
        raise _Unusable(f"{engine.name} has started threads, which don't live on in workers")
    return encoders


def run_reference(connection: Connection, inherited: Iterable[Connection]) -> None:
    """Load Hugging Face tokenizers on `load`; answer `ask` with what it gives, until the parent is gone."""
    _begin(inherited)
    loader = _Loader()
    try:
        while True:
            kind, spec, *details = connection.recv()
            if kind == "load":
                loader.load(spec)
                continue
            question: ParitySample = details[0]
            reply: object
            try:
                reply = ask(loader.get(spec), question.texts())
            except (DataError, OSError, MemoryError) as error:
                reply = Failure.of(error)
            except _Unusable as error:
                reply = _failure(error, spec)
            connection.send(("answers", reply))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass


def _failure(error: _Unusable, spec: EngineSpec) -> Difference | Failure:
    if spec.name == "fastokens":
        return Difference(str(error))
    return Failure(str(error), spec.json_path, action="mend tokenizer.json, or update the package tokenizers")
