"""Waits for a node's ranks, and passes on to them what asks them to stop.

torchrun itself ends with 1 whatever its ranks ended with, waits 30 s at most for a rank that saves, and lets ranks live
when it is killed. So its agent runs in a thread (`agent.py`), and the main thread
- passes the first signal that asks to stop on to the ranks once, so that they save and end; at SIGQUIT, or when they
  take longer than `GRACE_S`, it kills them;
- takes the death of the launcher for such a signal.
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
from pretrainkit.launch.processes import kill_descendants
from pretrainkit.run.outcome import Outcome
from pretrainkit.signals import STOP_SIGNALS

PID_FILE = "node.pid"
NODE_LOG = "node.log"
GRACE_S = 1800
"""Longest wait for ranks to save and end after a signal (assumed: a large model on a slow file system)."""
KILL_SIGNAL = signal.SIGQUIT
"""Means: kill the ranks, saved or not."""
_POLL_S = 0.1
_AGENT_S = 5
"""How long the agent may take to see that its ranks have been killed."""

log = logs.get_logger(__name__)


class StopRequests:
    """Notes the signals that ask this process to stop.

    The same request comes more than once: schedulers, cgroups and `timeout` signal every process, each of which passes
    it on. So repeating it changes nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._first_s = 0.0
        self._kill_asked = False

    def add(self, number: int = signal.SIGTERM, _: Any = None) -> None:
        """Note a request; also usable as a signal handler."""
        self._first_s = self._first_s or time.monotonic()
        self.asked = True
        self._kill_asked |= number == KILL_SIGNAL

    @property
    def is_urgent(self) -> bool:
        """Whether ranks are to be killed: asked for, or waited for too long."""
        return self._kill_asked or (self.asked and time.monotonic() - self._first_s > GRACE_S)


def write_everything_to(path: Path) -> int:
    """Send this process's stdout and stderr, and those of its children, to a file; gives the former stderr."""
    former = os.dup(sys.stderr.fileno())
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
    os.close(file)
    return former


def supervise(
    agent: Agent,
    requests: StopRequests,
    *,
    poll: Callable[[], None] = lambda: None,
    must_end: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Start the ranks and wait for their end, passing on what asks them to stop.

    Args:
        poll: called some times a second; may add a request.
        must_end: whether the ranks are to be ended though nobody asked, because another node has failed.
    """
    launcher = os.getppid()
    # The agent's thread and its ranks inherit what is blocked: a signal waits until they listen, and doesn't end them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    agent.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    told: set[int] = set()
    ended_s = None
    while agent.is_alive():
        agent.join(_POLL_S)
        poll()
        if os.getppid() != launcher and not requests.asked:
            log.warning("the launcher has died: the ranks are told to save and end")
            requests.add()
        if requests.is_urgent or must_end():
            kill_descendants()
            ended_s = ended_s or time.monotonic()
            if time.monotonic() - ended_s > _AGENT_S:
                break  # without ranks it still waits for the agents of other nodes
        elif requests.asked:
            _tell_ranks(told)
    kill_descendants()
    if requests.is_urgent:
        return Outcome(EXIT_FAILED, None, "killed before the ranks had saved")
    if agent.is_alive():
        return Outcome(EXIT_FAILED, None, "ended because another node had failed")
    if requests.asked and agent.outcome.exit_code == EXIT_FAILED:
        return replace(agent.outcome, reason=f"stopped before the ranks had saved: {agent.outcome.reason}")
    return agent.outcome


def _tell_ranks(told: set[int]) -> None:
    """Pass SIGTERM on, once to each rank; not to a rank's own children, which it needs for saving."""
    import psutil

    for rank in psutil.Process().children():
        if rank.pid not in told:
            told.add(rank.pid)
            log.info("process %d is told to save and end", rank.pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.terminate()
