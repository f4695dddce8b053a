"""Signals and time limits that ask a process to stop, as an error or as requests to a rank; and orphans (Linux)."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from pretrainkit.errors import EXIT_STOPPED_AFTER_SAVING, StoppedError
from pretrainkit.logs import get_logger
from pretrainkit.units import parse_duration

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that mean to a run: save and end. Schedulers announce the end of a job by one of the last three; some send
theirs to every process, so every process of a run handles the same ones."""

JOB_START_VARIABLE = "PRETRAINKIT_JOB_START_S"
"""Environment variable: start of the job or command that a rank belongs to, in seconds since 1970."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl (linux/prctl.h)."""

log = get_logger(__name__)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the system send this process a signal when its parent dies, however it dies."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class _Signal(BaseException):
    """A signal that arrived in the block. Not an Exception, so that no handler takes it for a failure of the work."""


@contextmanager
def stopped_by_signals(
    action: str, numbers: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
) -> Iterator[None]:
    """End the block with StoppedError at such a signal; a second one changes nothing.

    `action` says what to do next. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, is_stopping = os.getpid(), False

    def stop(number: int, _: Any) -> None:
        nonlocal is_stopping
        if is_stopping or os.getpid() != owner:  # a child that was just forked: its parent ends it
            return
        is_stopping = True
        raise _Signal(signal.Signals(number).name)

    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup asks for that
    earlier = {number: signal.signal(number, stop) for number in numbers if hangs_up or number != signal.SIGHUP}
    try:
        yield
    except _Signal as name:
        raise StoppedError(f"stopped by {name}", action=action) from None
    finally:
        is_stopping = True  # a signal that arrives now is too late
        for number, handler in earlier.items():
            signal.signal(number, handler)


def count_time_from_here() -> None:
    """Make --time_limit of the ranks that this process starts count from its own start, if not from its job's."""
    os.environ.setdefault(JOB_START_VARIABLE, str(psutil.Process().create_time()))


class RankStopRequests:
    """Whether this rank was asked to stop, by a signal or the time limit. Signals are noted from construction on.

    Before the first step there is nothing to save: until `begin_steps` a signal ends the rank at once.

    Schedulers signal every process of a job, also those that read data or write checkpoints for this rank, which needs
    them until it has saved. So the signals are blocked, which child processes inherit, and a thread of the rank waits
    for them. (Handlers don't work for that: torch sets its own in a DataLoader's workers, a new program has none.)
    """

    def __init__(self) -> None:
        self._asked, self._has_steps = False, False
        self._deadline_s = math.inf
        self._note: Callable[[], None] | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        threading.Thread(target=self._listen, name="stop signals", daemon=True).start()

    def limit_time(self, time_limit: str | None, time_margin: str) -> None:
        """Ask to stop `time_margin` before `time_limit` is over.

        The limit counts from the start of the scheduler's job or of pretrain.py, which set JOB_START_VARIABLE, else of
        this process: conversions, containers and checks of nodes take minutes before ranks start.
        """
        if time_limit:
            allowed_s = parse_duration(time_limit) - parse_duration(time_margin)
            start_s = float(os.environ.get(JOB_START_VARIABLE) or psutil.Process().create_time())
            self._deadline_s = start_s + allowed_s

    def note_end_by(self, note: Callable[[], None]) -> None:
        """Call `note` if a signal ends the rank before its first step."""
        self._note = note

    def begin_steps(self) -> None:
        """From now on only note signals. Raises StoppedError when the time is over already.

        As an error that counts as a restart without a new step, so that a limit that is too short for any start doesn't
        lead to endless restarts.
        """
        self._has_steps = True
        if time.time() > self._deadline_s:
            raise StoppedError(
                "the time limit is near before the first step: there is nothing to save",
                action="give the same command again; if that repeats, with a longer --time_limit or a shorter "
                "--time_margin",
                where="--time_limit",
            )

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to stop."""
        if not self._asked and time.time() > self._deadline_s:
            log.warning("the time limit is near: stopping after this step")
            self._asked = True
        return self._asked

    def _listen(self) -> None:
        while True:
            name = signal.Signals(signal.sigwait(STOP_SIGNALS)).name
            if not self._has_steps:
                log.warning("got %s before the first step: there is nothing to save", name)
                if self._note:
                    self._note()
                sys.stderr.flush()
                os._exit(EXIT_STOPPED_AFTER_SAVING)
            if not self._asked:
                log.warning("got %s: stopping after this step", name)
            self._asked = True
