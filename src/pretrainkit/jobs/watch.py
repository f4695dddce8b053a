"""Follows growing logs; --follow shows those of submitted jobs until they end, and returns their exit code."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from pretrainkit import files
from pretrainkit.config.launch import LaunchConfig
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING
from pretrainkit.jobs.registry import SCHEDULERS
from pretrainkit.jobs.scheduler import Run, runner_of
from pretrainkit.jobs.submit import SubmittedJob
from pretrainkit.logs import get_logger

_COPY_INTERVAL_S = 0.2
_BLOCK_BYTES = 1 << 16
_QUERY_INTERVAL_S = 10
"""Interval between queries of the scheduler: they cost every user of a cluster."""
_LATE_S = 15
"""Longest time until the exit code of an ended job is visible on the shared disk."""

log = get_logger(__name__)


class Follower:
    """Copies what is written to some files to a stream, as `tail -F` does, until the block ends.

    Files may appear later. Lines of several files don't mix. Nothing that was written before the block ended is lost.
    """

    def __init__(self, paths: Sequence[Path], stream: BinaryIO) -> None:
        self._paths, self._stream = paths, stream
        self._files: dict[Path, BinaryIO] = {}
        self._rests: dict[Path, bytes] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log follower", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for file in self._files.values():
            file.close()

    def _run(self) -> None:
        try:
            while not self._ended.wait(_COPY_INTERVAL_S):
                self._copy(last=False)
            self._copy(last=True)
        except (BrokenPipeError, ValueError):
            return  # the reader of our stream has closed it; the files keep everything

    def _copy(self, *, last: bool) -> None:
        for path in self._paths:
            if path not in self._files:
                if not path.exists():
                    continue
                self._files[path] = path.open("rb")
            was_replaced = not _is_open_file(path, self._files[path])
            while block := self._files[path].read(_BLOCK_BYTES):
                lines, newline, rest = (self._rests.pop(path, b"") + block).rpartition(b"\n")
                self._stream.write(lines + newline)
                self._rests[path] = rest
            if was_replaced:  # a requeued job has put its log aside
                self._files.pop(path).close()
            if last and (rest := self._rests.pop(path, b"")):
                self._stream.write(rest + b"\n")
        self._stream.flush()


def _is_open_file(path: Path, file: BinaryIO) -> bool:
    """Whether a path still names a file that was opened by it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def announce(
    submitted: Sequence[SubmittedJob],
    config: LaunchConfig,
    *,
    follows: bool,
    shown: AbstractContextManager[BinaryIO] | None = None,
) -> int:
    """Print ids and logs, and log the command that cancels the jobs; gives their exit code if asked to follow them.

    `shown` gives the stream to which their logs are copied; stderr by default.
    """
    for job in submitted:
        print(f"job {job.job_id}  log {job.logs[0] if len(job.logs) == 1 else f'{job.logs[0]} ...'}")
    sys.stdout.flush()
    words = SCHEDULERS[config.executor].cancel_command([job.job_id for job in submitted])
    log.info("to cancel: %s", shlex.join(words))
    if not follows:
        return EXIT_DONE
    continues = config.chain > 1 or config.requeue
    return follow(submitted, runner_of(config), continues=continues, shown=shown or nullcontext(sys.stderr.buffer))


def follow(
    submitted: Sequence[SubmittedJob], run: Run, *, continues: bool, shown: AbstractContextManager[BinaryIO]
) -> int:
    """Show the logs until the jobs end, and return their exit code: the first that isn't 0 of an array's tasks. Where
    a job `continues` the one before it, a chain or one that is queued again, that of the last one that ran.

    Interrupting this doesn't stop the jobs.
    """
    logs = [Path(path) for job in submitted for path in job.logs]
    code = EXIT_DONE
    try:
        with shown as stream, Follower(logs, stream):
            waiting = list(submitted)
            for number, job in enumerate(waiting, 1):
                codes = _wait(job, run, continues=continues)
                if not continues:
                    code = code or next((one for one in codes if one), EXIT_DONE)
                    continue
                code, successor = codes[0], job.successor
                if code and successor and successor.job_id not in {known.job_id for known in waiting}:
                    waiting.append(successor)
                    logs.append(Path(successor.logs[0]))
                # A run that is done or failed has cancelled the rest of its chain; one that hung or was lost hasn't.
                if not code or not any(_has_started(later) or later.is_alive(run) for later in waiting[number:]):
                    break
    except KeyboardInterrupt:
        log.warning("no longer following; the job keeps running. To cancel it: %s", submitted[0].cancel_command)
        raise
    log.info("ended with exit code %d", code)
    return code


def _has_started(job: SubmittedJob) -> bool:
    return Path(job.logs[0]).exists()


def _wait(job: SubmittedJob, run: Run, *, continues: bool) -> list[int]:
    """The exit code of a job, or those of an array's tasks.

    A job that has saved, or that others may continue, has ended once the scheduler no longer has it: it may be queued
    again, and by then it has cancelled the jobs after it or not.
    """
    codes: list[int | None] = []
    is_alive = True
    for path in map(Path, job.exit_files):

        def is_final(path: Path = path) -> bool:
            code = _read_code(path)
            return code is not None and code != EXIT_STOPPED_AFTER_SAVING and not (code and continues)

        def is_written(path: Path = path) -> bool:
            return _read_code(path) is not None

        while is_alive and not files.wait_until(is_final, timeout_s=_QUERY_INTERVAL_S):
            is_alive = job.is_alive(run)
            if not is_alive:
                files.wait_until(is_written, timeout_s=_LATE_S)
        codes.append(_read_code(path))
    if missing := codes.count(None):
        tasks = f" of {missing} of its {len(codes)} tasks" if len(codes) > 1 else ""
        reason = SCHEDULERS[job.scheduler].end_reason(job.job_id, run)
        details = f" ({reason})" if reason else ""
        log.error("job %s ended without an exit code%s: killed, cancelled or lost%s", job.job_id, tasks, details)
    return [EXIT_FAILED if code is None else code for code in codes]


def _read_code(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None
