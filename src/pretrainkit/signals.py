"""Signals that ask a command to stop, as an error that ends it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pretrainkit.errors import StoppedError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""What means to a run: save and end. Schedulers announce the end of a job by one of the last three; some send theirs to
every process, so all of a run listen to the same."""


class _Signal(BaseException):
    """Came while the work ran. No Exception, so that nothing takes it for the failure of what was going on."""


@contextmanager
def stopped_by_signals(
    action: str, numbers: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)
) -> Iterator[None]:
    """Such a signal ends the block as an error does, and becomes StoppedError; a second one changes nothing.

    `action` tells what to do next. Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, is_stopping = os.getpid(), False

    def stop(number: int, _: Any) -> None:
        nonlocal is_stopping
        if is_stopping or os.getpid() != owner:  # a forked process that begins: its parent ends it
            return
        is_stopping = True
        raise _Signal(signal.Signals(number).name)

    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup means it
    earlier = {number: signal.signal(number, stop) for number in numbers if hangs_up or number != signal.SIGHUP}
    try:
        yield
    except _Signal as name:
        raise StoppedError(f"stopped by {name}", action=action) from None
    finally:
        is_stopping = True  # a signal that comes now is too late
        for number, handler in earlier.items():
            signal.signal(number, handler)
