"""The worker processes: started before anything that must not be forked, and watched, so that none dies unseen."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from pretrainkit.data.worker import serve
from pretrainkit.errors import DataError

NOT_FORKABLE = ("tokenizers", "fastokens", "torch", "pyarrow")
"""Modules that may have started threads of their own, which don't live on in a forked process."""
GRACE_S = 2.0
"""A worker whose connection ended is given this long to end itself."""


class WorkerDied(DataError):
    """A worker ended without being told to."""


class WorkerPool:
    """Processes that each serve one connection. Use as a context: leaving it ends them all."""

    def __init__(self, count: int) -> None:
        forkable = threading.active_count() == 1 and not any(name in sys.modules for name in NOT_FORKABLE)
        context: Any = multiprocessing.get_context("fork" if forkable else "spawn")
        self.connections: list[Connection] = []
        self._processes: list[Any] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in range(count):
            ours, theirs = context.Pipe()
            inherited = [*self.connections, ours] if forkable else []
            process = context.Process(target=serve, args=(theirs, inherited), name=f"worker {number}", daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __len__(self) -> int:
        return len(self._processes)

    def send(self, worker: int, *message: Any, data: bytes | None = None) -> None:
        """Give a waiting worker a message, and bytes that go with it."""
        try:
            self.connections[worker].send(message)
            if data is not None:
                self.connections[worker].send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died(worker) from None

    def wake(self) -> None:
        """Make `wait` return; may be called by any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes it anyway
            os.write(self._wake_write, b"x")

    def wait(self, timeout_s: float) -> Iterator[tuple[int, str, Any]]:
        """Answers that have come: worker, kind and content. Raises WorkerDied."""
        for ready in wait([*self.connections, self._wake_read], timeout_s):
            if ready == self._wake_read:
                os.read(self._wake_read, 4096)
                continue
            worker = self.connections.index(ready)  # type: ignore[arg-type]
            try:
                kind, content = self.connections[worker].recv()
            except (EOFError, ConnectionResetError):
                raise self._died(worker) from None
            yield worker, kind, content

    def _died(self, worker: int) -> WorkerDied:
        process = self._processes[worker]
        process.join(GRACE_S)
        code = process.exitcode
        how = (
            f"was killed by signal {-code} ({signal.Signals(-code).name})" if code and code < 0 else f"exited ({code})"
        )
        hint = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
        return WorkerDied(
            f"worker {worker} (process {process.pid}) {how}{hint}",
            action="run the same command again: finished pieces are kept; with fewer --workers if memory was short",
        )

    def release(self, keep: int) -> None:
        """Let all but the first `keep` workers go."""
        for process, connection in zip(self._processes[keep:], self.connections[keep:], strict=True):
            process.kill()
            process.join()
            connection.close()
        del self._processes[keep:], self.connections[keep:]

    def kill(self) -> None:
        """End all workers at once. What they had not reported is lost, nothing else."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self.connections, strict=True):
            process.join()
            connection.close()
        self._processes, self.connections = [], []
