"""Of many processes that want the same prepared data, one prepares it and the others wait.

No collective is used, so no NCCL or gloo timeout counts. The lock is a file lock (flock), which the kernel lets go
when its process dies, so that another takes over at once. Some cluster file systems keep such locks on one node
only; therefore the preparer also touches a heartbeat file, and who gets the lock on another node waits as long as
that file is touched. One preparer a file system follows from looking at the data's own place.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from pretrainkit.errors import DataError
from pretrainkit.logs import get_logger
from pretrainkit.units import format_duration

LOGGER = get_logger(__name__)
HEARTBEAT_S = 5.0
SILENCE_S = 30.0
"""A preparer on another node that has not touched its heartbeat for so long is dead."""
POLL_S = 0.2
LINE_EVERY_S = 10.0
HEAD_START_S = 1.0
"""Rank 0 is given this long before others try to be the preparer, so that it is mostly the one."""


def prepare_once(
    final: Path,
    is_ready: Callable[[], bool],
    prepare: Callable[[], None],
    *,
    leftovers: Callable[[], list[Path]] = list,
    helpers: AbstractContextManager[object] | None = None,
    environment: Mapping[str, str] = os.environ,
    timeout_s: float = 24 * 3600.0,
) -> bool:
    """Make sure that `final` is ready; True if this process prepared it.

    `is_ready` looks at the place; `prepare` fills it, atomically. When a preparer fails, its error is its own, and
    the next process in line tries. `leftovers` lists the folders of a preparer that died after it had filled the
    place; they are removed. `helpers` is entered around `prepare`, before the heartbeat's thread begins: processes may
    be forked there. Raises DataError when nothing is ready after `timeout_s`.
    """
    if is_ready():
        _clear(final, leftovers)
        return False
    try:
        return _prepare_or_wait(final, is_ready, prepare, helpers, environment, timeout_s)
    except OSError as error:
        raise DataError(
            error.strerror or str(error), where=str(error.filename or final), action="mend it, and start again"
        ) from error


def _prepare_or_wait(
    final: Path,
    is_ready: Callable[[], bool],
    prepare: Callable[[], None],
    helpers: AbstractContextManager[object] | None,
    environment: Mapping[str, str],
    timeout_s: float,
) -> bool:
    rank = int(environment.get("RANK") or environment.get("SLURM_PROCID") or 0)
    began = last_line = time.monotonic()
    if rank:
        time.sleep(HEAD_START_S)
    final.parent.mkdir(parents=True, exist_ok=True)
    lock, heartbeat = (final.with_name(final.name + suffix) for suffix in (".lock", ".preparing"))
    watch = _Watch(heartbeat)
    while not is_ready():
        with _locked(lock) as got:
            # What was ready may have become so while this process waited for the lock.
            if got and not is_ready() and not watch.is_alive_elsewhere():
                LOGGER.info("rank %d on %s prepares %s", rank, socket.gethostname(), final)
                with contextlib.nullcontext() if helpers is None else helpers, _beating(heartbeat):
                    prepare()
                return True
        now = time.monotonic()
        if now - began > timeout_s:
            raise DataError(
                f"not prepared after {format_duration(timeout_s)}", where=str(final), action="see the preparer's log"
            )
        if now - last_line >= LINE_EVERY_S:
            last_line = now
            LOGGER.info("rank %d waits for %s, %s so far: %s", rank, final, format_duration(now - began), watch.told())
        time.sleep(POLL_S)
    LOGGER.info("rank %d: %s is ready after %s", rank, final, format_duration(time.monotonic() - began))
    return False


def _clear(final: Path, leftovers: Callable[[], list[Path]]) -> None:
    """Remove what is left beside a place that is ready, unless its preparer still lives: then it does so itself."""
    lock, heartbeat = (final.with_name(final.name + suffix) for suffix in (".lock", ".preparing"))
    if not (heartbeat.exists() or leftovers()):
        return
    with contextlib.suppress(OSError), _locked(lock) as got:  # a place that can only be read stays as it is
        if got and not _Watch(heartbeat).is_alive_elsewhere():
            for folder in leftovers():
                shutil.rmtree(folder, ignore_errors=True)
            heartbeat.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether the lock was free; it is then held while the block runs."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


@contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Touch the heartbeat file while the block runs."""
    stop = threading.Event()
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}))

    def beat() -> None:
        while not stop.wait(HEARTBEAT_S):
            try:
                os.utime(path)
            except FileNotFoundError:
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        path.unlink(missing_ok=True)


class _Watch:
    """Looks at a heartbeat; compares it with itself, never with this node's clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: int | None = None
        self._since = 0.0

    def is_alive_elsewhere(self) -> bool:
        """Whether a preparer on another node may be alive. One on this node would hold the lock."""
        try:
            modified = self._path.stat().st_mtime_ns
            host = json.loads(self._path.read_text())["host"]
        except (OSError, ValueError, KeyError):
            return False
        if host == socket.gethostname():
            return False
        now = time.monotonic()
        if modified != self._seen:
            self._seen, self._since = modified, now
        return now - self._since < SILENCE_S

    def told(self) -> str:
        """Who prepares, for the log."""
        try:
            found = json.loads(self._path.read_text())
            return f"process {found['pid']} on {found['host']} prepares it"
        except (OSError, ValueError, KeyError):
            return "nobody prepares it yet"
