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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from pretrainkit import files
from pretrainkit.errors import DataError, StoppedError, machine_errors
from pretrainkit.logs import get_logger
from pretrainkit.units import format_duration

LOGGER = get_logger(__name__)
HEARTBEAT_S = 5.0
SILENCE_S = 30.0
"""A builder on another node that has not touched its heartbeat for so long is dead."""
LINE_EVERY_S = 10.0
LATE_RANK_S = 60.0
"""A rank that comes so long after another of its start has failed doesn't try again."""
HEAD_START_S = 1.0
"""Other ranks wait this long before they try, so rank 0 usually wins the lock."""


def build_once(
    final: Path,
    is_ready: Callable[[], bool],
    build: Callable[[], None],
    *,
    leftovers: Callable[[], list[Path]] = list,
    pool: AbstractContextManager[object] = contextlib.nullcontext(),  # noqa: B008
    timeout_s: float = 24 * 3600.0,
) -> bool:
    """Make sure that `final` is ready; True if this process built it.

    When a builder fails, the processes that wait for it fail too, and a later start tries again. When it is killed or
    stopped, the next process that gets the lock goes on.

    Args:
        final: the output.
        is_ready: looks whether the output is there.
        build: makes the output, atomically.
        leftovers: lists the folders of a builder that died after it had made the output; they are removed.
        pool: entered around `build`, before the heartbeat's thread starts, so worker processes may be forked in it.
        timeout_s: longest time to wait for another builder.

    Raises:
        DataError: another process failed to build it, nothing is ready after `timeout_s`, or the disk can't be written.
    """
    heartbeat = _Heartbeat(final)
    with machine_errors(final, "fix it, and start again"):
        if not is_ready():
            return _build_or_wait(heartbeat, is_ready, build, pool, timeout_s)
        if heartbeat.path.exists() or leftovers():
            # A place that is read-only, or has no file locks, stays as it is. A living builder removes them itself.
            with contextlib.suppress(OSError, DataError), heartbeat.turn() as is_ours:
                for folder in leftovers() if is_ours else ():
                    shutil.rmtree(folder, ignore_errors=True)
                if is_ours:
                    heartbeat.path.unlink(missing_ok=True)
        return False


def _build_or_wait(
    heartbeat: _Heartbeat,
    is_ready: Callable[[], bool],
    build: Callable[[], None],
    pool: AbstractContextManager[object],
    timeout_s: float,
) -> bool:
    final, failure = heartbeat.final, _FailureMark(heartbeat.final)
    rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    began = last_line = time.monotonic()
    if rank:
        time.sleep(HEAD_START_S)
    final.parent.mkdir(parents=True, exist_ok=True)

    def attempt() -> str:
        nonlocal last_line
        if is_ready():
            return "ready"
        with heartbeat.turn() as is_ours:
            failure.raise_if_new()
            # Another process may have finished it while this one waited for its turn.
            if is_ours and not is_ready():
                LOGGER.info("rank %d on %s builds %s", rank, socket.gethostname(), final)
                with failure.written_on_error(), pool, heartbeat.beating():
                    build()
                return "built"
        now = time.monotonic()
        if now - last_line >= LINE_EVERY_S:
            last_line = now
            waited = format_duration(now - began)
            LOGGER.info("rank %d has waited %s for %s: %s", rank, waited, final, heartbeat.status())
        return ""

    outcome = files.wait_until(attempt, timeout_s=timeout_s)
    if not outcome:
        raise DataError(
            f"not ready after {format_duration(timeout_s)}", where=str(final), action="see the log of its builder"
        )
    if outcome == "ready":
        LOGGER.info("rank %d: %s is ready after %s", rank, final, format_duration(time.monotonic() - began))
    return outcome == "built"


class _FailureMark:
    """A file next to an output that says why it could not be built, for the processes that wait for it."""

    def __init__(self, final: Path) -> None:
        self._final, self._path = final, final.with_name(f"{final.name}.failed")
        self._old = self._read()
        """Of an earlier start, whose cause may be fixed by now."""

    def _read(self) -> dict[str, Any]:
        try:
            return {**json.loads(self._path.read_text()), "modified_ns": self._path.stat().st_mtime_ns}
        except (OSError, ValueError, TypeError):
            return {}

    def raise_if_new(self) -> None:
        """Raises DataError when a process of this start failed."""
        mark = self._read()
        is_of_late_rank = mark and _launch() and mark.get("launch") == _launch()
        if mark and (mark != self._old or (is_of_late_rank and time.time() - mark["modified_ns"] / 1e9 < LATE_RANK_S)):
            raise DataError(
                f"process {mark.get('pid')} on {mark.get('host')} could not build it: {mark.get('error')}",
                where=str(self._final),
                action="fix that, and start again",
            )

    @contextmanager
    def written_on_error(self) -> Iterator[None]:
        """Make the mark if the block fails; a stop by a signal is no failure."""
        self._path.unlink(missing_ok=True)
        try:
            yield
        except StoppedError:
            raise
        except Exception as error:
            with contextlib.suppress(OSError):
                owner = {"host": socket.gethostname(), "pid": os.getpid(), "launch": _launch()}
                files.write_json(self._path, {**owner, "error": str(error)})
            raise


def _launch() -> str:
    """What the ranks of one start share; empty for a process that is alone, as in a shell."""
    if int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1) < 2:
        return ""
    scheduler = "SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "JOB_ID"
    torchrun = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"
    return " ".join(f"{name}={os.environ[name]}" for name in (*scheduler, *torchrun) if os.environ.get(name))


class _Heartbeat:
    """The lock of an output, and the file next to it that its builder touches while it works."""

    def __init__(self, final: Path) -> None:
        self.final, self.path = final, final.with_name(f"{final.name}.preparing")
        self._seen_ns = 0
        self._since_s = 0.0

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Whether no other process builds, on this node or another; none on this node begins while the block runs."""
        with contextlib.ExitStack() as stack:
            try:
                has_locks = stack.enter_context(files.locked(self.final.with_name(f"{self.final.name}.lock")))
            except files.LockHeldError:
                yield False
                return
            if not has_locks:
                raise DataError(
                    "its file system has no file locks, so several processes would build it",
                    where=str(self.final),
                    action="build it on another disk, and copy it",
                )
            yield not self._is_alive_elsewhere()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Touch the file while the block runs."""
        stop = threading.Event()
        self.path.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))

        def beat() -> None:
            while not stop.wait(HEARTBEAT_S):
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self.path)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.path.unlink(missing_ok=True)

    def _builder(self) -> dict[str, Any]:
        """Host and process of the builder, and when it touched the file; empty when there is none."""
        try:
            return {**json.loads(self.path.read_text()), "modified_ns": self.path.stat().st_mtime_ns}
        except (OSError, ValueError, TypeError):
            return {}

    def _is_alive_elsewhere(self) -> bool:
        """Whether a builder on another node may be alive. One on this node would hold the lock.

        The file's time is compared with what was seen before, never with this node's clock.
        """
        builder, now_s = self._builder(), time.monotonic()
        if builder.get("host", socket.gethostname()) == socket.gethostname():
            return False
        if builder["modified_ns"] != self._seen_ns:
            self._seen_ns, self._since_s = builder["modified_ns"], now_s
        return now_s - self._since_s < SILENCE_S

    def status(self) -> str:
        """Who builds, for the log."""
        builder = self._builder()
        return f"process {builder['pid']} on {builder['host']} builds it" if builder else "no process builds it yet"
