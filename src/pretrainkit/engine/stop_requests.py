"""Signals and the time limit: what asks a rank to save and end."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import psutil

from pretrainkit.errors import EXIT_STOPPED_AFTER_SAVING, StoppedError
from pretrainkit.logs import get_logger
from pretrainkit.signals import STOP_SIGNALS
from pretrainkit.units import parse_duration

JOB_START_VARIABLE = "PRETRAINKIT_JOB_START_S"
"""When the job or command began that this rank belongs to, in seconds since 1970."""

log = get_logger(__name__)


def count_time_from_here() -> None:
    """Let --time_limit of ranks that this process starts count from its own beginning, if not from its job's."""
    os.environ.setdefault(JOB_START_VARIABLE, str(psutil.Process().create_time()))


class StopRequests:
    """Notes the signals that this rank gets, from its beginning on.

    Before the first step there is nothing to save: until `begin_steps` a signal ends the rank at once.

    Schedulers signal every process of a job: those that read data or write checkpoints for this rank, too, and they
    are needed until it has saved. So the signals are blocked, which processes inherit that are started from now on,
    and a thread of the rank waits for them. (Handlers would not do: torch sets its own in a DataLoader's workers, and
    a new program starts without any.)
    """

    def __init__(self) -> None:
        self._asked, self._has_steps = False, False
        self._deadline_s = math.inf
        self._note: Callable[[], None] | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        threading.Thread(target=self._listen, name="stop signals", daemon=True).start()

    def limit_time(self, time_limit: str | None, time_margin: str) -> None:
        """Ask for an end `time_margin` before `time_limit` is over.

        It is counted from the beginning of the scheduler's job or of pretrain.py, which say when that was, else of this
        process: conversions, containers and checks of nodes take minutes before there is a rank.
        """
        if time_limit:
            allowed_s = parse_duration(time_limit) - parse_duration(time_margin)
            start_s = float(os.environ.get(JOB_START_VARIABLE) or psutil.Process().create_time())
            self._deadline_s = start_s + allowed_s

    def note_end_by(self, note: Callable[[], None]) -> None:
        """Call `note` should a signal end the rank before its first step."""
        self._note = note

    def begin_steps(self) -> None:
        """From now on a signal is only noted. Raises StoppedError when the time is over already.

        Nobody asked for that: as an error it counts as a restart without a new step, so that a limit which no start can
        keep doesn't end in a loop of restarts.
        """
        self._has_steps = True
        if time.time() > self._deadline_s:
            raise StoppedError(
                "the time limit is near before the first step: there is nothing to save",
                action="give the same command again, and a longer --time_limit or a shorter --time_margin where that "
                "happens again",
                where="--time_limit",
            )

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to end."""
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
