"""Signals and the time limit: what asks a rank to save and end."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import psutil

from pretrainkit.errors import EXIT_STOPPED_AFTER_SAVING
from pretrainkit.logs import get_logger
from pretrainkit.units import parse_duration

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send before a job's time is over."""

log = get_logger(__name__)


class StopRequests:
    """Notes the signals that this rank gets, from its beginning on.

    Before the first step there is nothing to save: until `begin_steps` a signal ends the rank at once.
    """

    def __init__(self) -> None:
        self._asked, self._has_steps = False, False
        self._deadline_s = math.inf
        self._process = os.getpid()
        for number in STOP_SIGNALS:
            signal.signal(number, self._ask)

    def limit_time(self, time_limit: str | None, time_margin: str) -> None:
        """Ask for an end `time_margin` before `time_limit` is over, counted from the beginning of this process."""
        if time_limit:
            allowed_s = parse_duration(time_limit) - parse_duration(time_margin)
            self._deadline_s = psutil.Process().create_time() + allowed_s

    def begin_steps(self) -> None:
        """From now on a signal is only noted."""
        self._has_steps = True

    @property
    def asked(self) -> bool:
        """Whether this rank was asked to end."""
        if not self._asked and time.time() > self._deadline_s:
            log.warning("the time limit is near: stopping after this step")
            self._asked = True
        return self._asked

    def _ask(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            return  # a process that writes or reads for this rank goes on until the rank ends it
        self._asked = True
        if not self._has_steps:
            log.warning("got %s before the first step: there is nothing to save", signal.Signals(number).name)
            raise SystemExit(EXIT_STOPPED_AFTER_SAVING)
        log.warning("got %s: stopping after this step", signal.Signals(number).name)
