"""Of many processes that want the same data set, one builds it and the others wait.

No collective is used, so no NCCL or gloo timeout applies. Who builds is decided by a file lock, which the kernel
releases when its process dies, so that another takes over at once. Some cluster file systems keep such locks on one
node only; therefore the builder also touches a heartbeat file, and a process that gets the lock on another node waits
as long as that file is touched. There is one builder per file system because the lock is a file next to the output.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from pretrainkit import files
from pretrainkit.errors import DataError
from pretrainkit.logs import get_logger
from pretrainkit.units import format_duration

LOGGER = get_logger(__name__)
HEARTBEAT_S = 5.0
SILENCE_S = 30.0
"""A builder on another node that has not touched its heartbeat for so long is dead."""
LINE_EVERY_S = 10.0
HEAD_START_S = 1.0
"""Other ranks wait this long before they try, so rank 0 usually wins the lock."""


def build_once(
    final: Path,
    is_ready: Callable[[], bool],
    build: Callable[[], None],
    *,
    leftovers: Callable[[], list[Path]] = list,
    pool: AbstractContextManager[object] | None = None,
    environment: Mapping[str, str] = os.environ,
    timeout_s: float = 24 * 3600.0,
) -> bool:
    """Make sure that `final` is ready; True if this process built it.

    When a builder fails, its error is its own, and the next process that gets the lock tries.

    Args:
        final: the output.
        is_ready: looks whether the output is there.
        build: makes the output, atomically.
        leftovers: lists the folders of a builder that died after it had made the output; they are removed.
        pool: entered around `build`, before the heartbeat's thread starts, so worker processes may be forked in it.
        environment: names this process's rank.
        timeout_s: longest time to wait for another builder.

    Raises:
        DataError: nothing is ready after `timeout_s`, or the disk can't be written.
    """
    try:
        if is_ready():
            _remove_leftovers(final, leftovers)
            return False
        return _build_or_wait(final, is_ready, build, pool, environment, timeout_s)
    except OSError as error:
        raise DataError(
            error.strerror or str(error), where=str(error.filename or final), action="fix it, and start again"
        ) from error


def _build_or_wait(
    final: Path,
    is_ready: Callable[[], bool],
    build: Callable[[], None],
    pool: AbstractContextManager[object] | None,
    environment: Mapping[str, str],
    timeout_s: float,
) -> bool:
    rank = int(environment.get("RANK") or environment.get("SLURM_PROCID") or 0)
    began = last_line = time.monotonic()
    if rank:
        time.sleep(HEAD_START_S)
    final.parent.mkdir(parents=True, exist_ok=True)
    heartbeat = _Heartbeat(final)
    was_built_here = False

    def is_done() -> bool:
        nonlocal was_built_here, last_line
        if is_ready():
            return True
        with _try_lock(final) as is_locked:
            # Another process may have finished it while this one waited for the lock.
            if is_locked and not is_ready() and not heartbeat.is_alive_elsewhere():
                LOGGER.info("rank %d on %s builds %s", rank, socket.gethostname(), final)
                with contextlib.nullcontext() if pool is None else pool, heartbeat.beating():
                    build()
                was_built_here = True
                return True
        now = time.monotonic()
        if now - last_line >= LINE_EVERY_S:
            last_line = now
            waited = format_duration(now - began)
            LOGGER.info("rank %d has waited %s for %s: %s", rank, waited, final, heartbeat.status())
        return False

    if not files.wait_until(is_done, timeout_s=timeout_s):
        raise DataError(
            f"not ready after {format_duration(timeout_s)}", where=str(final), action="see the log of its builder"
        )
    if not was_built_here:
        LOGGER.info("rank %d: %s is ready after %s", rank, final, format_duration(time.monotonic() - began))
    return was_built_here


def _remove_leftovers(final: Path, leftovers: Callable[[], list[Path]]) -> None:
    """Remove what is left next to a finished output, unless its builder is alive: then it does so itself."""
    heartbeat = _Heartbeat(final)
    if not (heartbeat.path.exists() or leftovers()):
        return
    # A place that is read-only, or has no file locks, stays as it is.
    with contextlib.suppress(OSError, DataError), _try_lock(final) as is_locked:
        if is_locked and not heartbeat.is_alive_elsewhere():
            for folder in leftovers():
                shutil.rmtree(folder, ignore_errors=True)
            heartbeat.path.unlink(missing_ok=True)


@contextmanager
def _try_lock(final: Path) -> Iterator[bool]:
    """Whether the lock was free; it is then held while the block runs."""
    with contextlib.ExitStack() as stack:
        try:
            has_locks = stack.enter_context(files.locked(final.with_name(f"{final.name}.lock")))
        except files.LockHeldError:
            yield False
            return
        if not has_locks:
            raise DataError(
                "its file system has no file locks, so several processes would build it",
                where=str(final),
                action="build it on another disk, and copy it",
            )
        yield True


class _Heartbeat:
    """The file next to an output that its builder touches while it works."""

    def __init__(self, final: Path) -> None:
        self.path = final.with_name(f"{final.name}.preparing")
        self._seen_ns: int | None = None
        self._since_s = 0.0

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Touch the file while the block runs."""
        stop = threading.Event()
        self.path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}))

        def beat() -> None:
            while not stop.wait(HEARTBEAT_S):
                try:
                    os.utime(self.path)
                except FileNotFoundError:
                    return

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.path.unlink(missing_ok=True)

    def is_alive_elsewhere(self) -> bool:
        """Whether a builder on another node may be alive. One on this node would hold the lock.

        The file's time is compared with what was seen before, never with this node's clock.
        """
        try:
            modified_ns = self.path.stat().st_mtime_ns
            host = json.loads(self.path.read_text())["host"]
        except (OSError, ValueError, KeyError):
            return False
        if host == socket.gethostname():
            return False
        now_s = time.monotonic()
        if modified_ns != self._seen_ns:
            self._seen_ns, self._since_s = modified_ns, now_s
        return now_s - self._since_s < SILENCE_S

    def status(self) -> str:
        """Who builds, for the log."""
        try:
            found = json.loads(self.path.read_text())
            return f"process {found['pid']} on {found['host']} builds it"
        except (OSError, ValueError, KeyError):
            return "no process builds it yet"
