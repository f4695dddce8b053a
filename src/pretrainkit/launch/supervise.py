"""Supervises a node's ranks: forwards stop requests to them, and leaves no process behind.

torchrun itself ends with 1 whatever its ranks ended with, waits at most 30 s for a rank that saves, and leaves ranks
running when it is killed. So its agent runs in a thread (`agent.py`), and the main thread
- forwards the first stop signal to the ranks once, so that they save and end; at SIGQUIT, or when they take longer than
  `GRACE_S`, it kills them;
- treats the death of the launcher as a stop signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pretrainkit import logs
from pretrainkit.errors import EXIT_FAILED
from pretrainkit.launch.agent import Agent
from pretrainkit.run.outcome import Outcome
from pretrainkit.signals import STOP_SIGNALS

GRACE_S = 1800
"""Longest wait for ranks to save and end after a signal (assumed: a large model on a slow file system)."""
KILL_SIGNAL = signal.SIGQUIT
"""Kills the ranks, whether they have saved or not."""
_POLL_S = 0.1
_AGENT_S = 5
"""Longest wait for the agent to notice that its ranks were killed."""
_KILL_WAIT_S = 10

log = logs.get_logger(__name__)


class GracefulStop:
    """The stop signals that this process has received.

    One request arrives several times: schedulers, cgroups and `timeout` signal every process, and each forwards it. So
    repeating it changes nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first_s = 0.0
        self._kill_requested = False

    def request(self, number: int = signal.SIGTERM, _: Any = None) -> None:
        """Note a request; also usable as a signal handler."""
        self._first_s = self._first_s or time.monotonic()
        self.requested = True
        self._kill_requested |= number == KILL_SIGNAL

    @property
    def should_kill(self) -> bool:
        """Whether to kill the ranks: on request, or because they have taken too long to save."""
        return self._kill_requested or (self.requested and time.monotonic() - self._first_s > GRACE_S)


def supervise(
    agent: Agent,
    stop: GracefulStop,
    *,
    poll: Callable[[], None] = lambda: None,
    should_abort: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Start the ranks and wait for their end, forwarding stop requests.

    Args:
        poll: called some times a second; may request a stop.
        should_abort: whether to kill the ranks because another node has failed.
    """
    launcher = os.getppid()
    # The agent's thread and its ranks inherit the mask: a signal stays pending until they listen, and kills none.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    agent.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    signalled: set[int] = set()
    killed_s = None
    while agent.is_alive():
        agent.join(_POLL_S)
        poll()
        if os.getppid() != launcher and not stop.requested:
            log.warning("the launcher has died: sending SIGTERM to the ranks")
            stop.request()
        if stop.should_kill or should_abort():
            kill_descendants()
            killed_s = killed_s or time.monotonic()
            if time.monotonic() - killed_s > _AGENT_S:
                break  # it waits for the agents of other nodes
        elif stop.requested:
            _signal_ranks(signalled)
    kill_descendants()
    if stop.should_kill:
        return Outcome(EXIT_FAILED, None, "killed before the ranks had saved")
    if agent.is_alive():
        return Outcome(EXIT_FAILED, None, "ended because another node had failed")
    if stop.requested and agent.outcome.exit_code == EXIT_FAILED:
        return replace(agent.outcome, reason=f"stopped before the ranks had saved: {agent.outcome.reason}")
    return agent.outcome


def _signal_ranks(signalled: set[int]) -> None:
    """Send SIGTERM to each rank once, but not to a rank's own children, which it needs for saving."""
    import psutil

    for rank in psutil.Process().children():
        if rank.pid not in signalled:
            signalled.add(rank.pid)
            log.info("sending SIGTERM to rank process %d (save and exit)", rank.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.terminate()


def redirect_output(path: Path) -> int:
    """Send this process's stdout and stderr, and those of its children, to a file; returns the former stderr."""
    former = os.dup(sys.stderr.fileno())
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)
    return former


def kill_descendants() -> list[int]:
    """Kill every descendant of this process and wait for their end; returns the ids of those that were alive."""
    import psutil

    killed = []
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                killed.append(process.pid)
    psutil.wait_procs(descendants, timeout=_KILL_WAIT_S)
    return killed
