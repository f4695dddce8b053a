"""Forks of a rank, each seen to begin, and ended.

A rank forks while its libraries have threads: processes that read data, at the first evaluation again, and those that
write a checkpoint. Before 3.10.15, 3.11.10 and 3.12 a forked Python takes a lock that a thread of its parent may have
held just then (https://github.com/python/cpython/issues/112275): gloo's threads do when they let go of a tensor. Such a
process waits for ever, the rank waits for it, and all others for the rank. Locks of C libraries can do the same.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable

from pretrainkit.logs import get_logger

BEGIN_TIMEOUT_S = 20.0
"""A forked process begins within milliseconds, within seconds where memory is short; one killed early costs nothing."""

_TRIES = 5

log = get_logger(__name__)


def watch_forks() -> None:
    """From now on every os.fork of this process, and of those it forks, is tried again where the child stands still.

    All of multiprocessing goes through it, NeMo's data loaders and Megatron's writers with it.
    """
    plain_fork = os.fork
    setattr(os, "fork", lambda: fork_seen_to_begin(plain_fork, BEGIN_TIMEOUT_S))  # noqa: B010 - mypy refuses the assignment


def kill_children(*, readers_only: bool = False) -> None:
    """Kill processes that this one's libraries have started, when it needs them no more.

    At its end Python waits for all that don't obey SIGTERM, which is blocked in them (see StopRequests): one that waits
    for its file system would hold the rank, and all others, for ever. `readers_only`: none that write checkpoints.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler makes an error of it
    for process in multiprocessing.active_children():
        if process.daemon or not readers_only:  # a DataLoader's are daemons, Megatron's are not
            process.kill()


def fork_seen_to_begin(fork: Callable[[], int], timeout_s: float) -> int:
    """What `fork` returns, in a child that runs, and in its parent once that child does.

    Raises TimeoutError when five in turn didn't begin within `timeout_s` each; they are killed.
    """
    for _ in range(_TRIES):
        reads, writes = os.pipe()
        pid = fork()
        if pid == 0:
            os.write(writes, b".")
            os.close(reads)
            os.close(writes)
            return 0
        os.close(writes)
        try:
            if _says_something(reads, timeout_s):
                return pid
        finally:
            os.close(reads)
        log.warning("a forked process stood still before its first line: it is killed, and another forked")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    raise TimeoutError(f"{_TRIES} forked processes in turn did not begin within {timeout_s:g} s")


def _says_something(pipe: int, timeout_s: float) -> bool:
    """Whether a byte came, or the other end was closed: a child that died is not one that stands still."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
