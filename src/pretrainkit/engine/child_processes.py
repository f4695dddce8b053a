"""The processes that a rank forks: each fork is confirmed to have started, and all are killed before the rank ends.

A rank forks while its libraries have threads: DataLoader workers, for the first evaluation again, and the writers of a
checkpoint. Before 3.11.10 a forked Python takes a lock that a thread of its parent may have held at that moment
(https://github.com/python/cpython/issues/112275): gloo's threads hold it when they release a tensor. The child then
waits forever, the rank for the child, and all others for the rank. Locks of C libraries can do the same.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Callable

from pretrainkit.logs import get_logger
from pretrainkit.units import format_duration

START_TIMEOUT_S = 20.0
"""A forked process starts within milliseconds, within seconds where memory is short; one killed early costs nothing."""
_TRIES = 5

log = get_logger(__name__)


def use_fork_timeout() -> None:
    """From now on every os.fork of this process, and of its children, is repeated where the child does not start.

    multiprocessing forks by it, and with it DataLoaders and Megatron's writers.
    """
    plain_fork = os.fork
    setattr(os, "fork", lambda: fork_with_timeout(plain_fork, START_TIMEOUT_S))  # noqa: B010 - mypy refuses the assignment


def fork_with_timeout(fork: Callable[[], int], timeout_s: float) -> int:
    """What `fork` returns: in the child at once, in the parent when the child has started.

    Raises TimeoutError when five children in turn have not started within `timeout_s` each; they are killed.
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
        poll = select.poll()
        poll.register(reads)
        started = poll.poll(timeout_s * 1000)  # also when the child has died, which closes its end
        os.close(reads)
        if started:
            return pid
        log.warning(
            "a forked process did not start within %s: it is killed, and another is forked", format_duration(timeout_s)
        )
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    raise TimeoutError(f"{_TRIES} forked processes in turn did not start within {format_duration(timeout_s)} each")


def kill_children(*, loader_workers_only: bool = False) -> None:
    """Kill the processes that libraries started for this one, when it doesn't need them any more.

    At exit Python joins all that ignore SIGTERM, which is blocked in them (see pretrainkit.signals): one that waits for
    its file system would block the rank, and all others, forever. `loader_workers_only` spares a checkpoint's writers.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for it
    for process in multiprocessing.active_children():
        if process.daemon or not loader_workers_only:  # a DataLoader's workers are daemons, Megatron's writers are not
            process.kill()
