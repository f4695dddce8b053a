"""The process that `shards.workers` asks for the ids of Hugging Face tokenizers."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from pretrainkit.data.tokens.encode_pool import NOT_FORKABLE, REFERENCE, WorkerDied
from pretrainkit.data.tokens.encoder import EngineSpec, load_encoder, one_thread
from pretrainkit.data.tokens.parity import Answers, ParitySample, ask
from pretrainkit.errors import DataError, PretrainkitError


def is_forkable() -> bool:
    """Whether this process may be forked: no threads of Python, nor of a library that is known to have some."""
    return threading.active_count() == 1 and not any(name in sys.modules for name in NOT_FORKABLE)


def _answer(connection: Connection, engine: EngineSpec, sample: ParitySample) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    one_thread()
    reply: Answers | PretrainkitError
    try:
        reply = ask(load_encoder(engine), sample.texts())
    except PretrainkitError as error:
        reply = error
    except Exception as error:  # the Rust libraries raise errors of many kinds
        reply = DataError(f"{engine.name} does not load this tokenizer: {error}", where=engine.json_path)
    connection.send(reply)


class Reference:
    """A process that holds Hugging Face tokenizers and is asked once what that library gives."""

    def __init__(self, engine: EngineSpec, sample: ParitySample) -> None:
        context: Any = multiprocessing.get_context("fork" if is_forkable() else "spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs, engine, sample), name=REFERENCE, daemon=True)
        self._process.start()
        theirs.close()

    def answers(self) -> Answers:
        """What it gives. Raises DataError when the input can't be read, or the process has died."""
        try:
            reply = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise WorkerDied(f"{REFERENCE} ended ({self._process.exitcode})") from None
        if isinstance(reply, PretrainkitError):
            raise reply
        return reply

    def end(self) -> None:
        """Let go of it, answered or not."""
        self._connection.close()
        self._process.kill()
        self._process.join()
