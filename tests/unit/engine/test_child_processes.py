"""Forked processes that never start: killed, and forked again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from pretrainkit.engine.child_processes import fork_with_timeout


def fork_that_stands_still(tries: int) -> Callable[[], int]:
    """A fork whose first `tries` children never return from it."""
    plain_fork, left = os.fork, [tries]

    def fork() -> int:
        stands_still, left[0] = left[0] > 0, left[0] - 1
        pid = plain_fork()
        if pid == 0 and stands_still:
            time.sleep(1000)
        return pid

    return fork


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def test_a_child_that_begins_runs_and_ends_as_always() -> None:
    pid = fork_with_timeout(os.fork, 20)
    if pid == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_children_that_stand_still_are_killed_and_others_forked(caplog: pytest.LogCaptureFixture) -> None:
    before, descriptors = children(), psutil.Process().num_fds()
    pid = fork_with_timeout(fork_that_stands_still(2), 0.2)
    if pid == 0:
        os._exit(7)
    assert caplog.text.count("did not start within") == 2
    assert children() - before == {pid}
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert psutil.Process().num_fds() == descriptors


def test_where_none_begins_it_is_an_error_and_none_is_left() -> None:
    before = children()
    with pytest.raises(TimeoutError, match=r"5 forked processes in turn did not start within 0\.1 s each"):
        fork_with_timeout(fork_that_stands_still(99), 0.1)
    assert children() == before


def test_a_child_killed_before_it_begins_is_not_waited_for() -> None:
    plain_fork = os.fork

    def fork_of_a_child_that_dies() -> int:
        pid = plain_fork()
        if pid == 0:
            os._exit(9)
        return pid

    began_s = time.monotonic()
    pid = fork_with_timeout(fork_of_a_child_that_dies, 60)
    assert time.monotonic() - began_s < 30
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


LOADER = """
import os, time
import torch
from pretrainkit.engine import child_processes

forks = 0

def count():
    global forks
    forks += 1

# As Python's own lock does: in the child, before os.fork returns. The first loader's second worker, and the manager.
os.register_at_fork(before=count, after_in_child=lambda: time.sleep(1000) if forks in (2, 4) else None)
child_processes.START_TIMEOUT_S = 1.0
child_processes.use_fork_timeout()
loader = torch.utils.data.DataLoader(range(8), batch_size=2, num_workers=2)
print(sorted(int(number) for batch in loader for number in batch))
queue = torch.multiprocessing.get_context("fork").Manager().Queue()
queue.put("written")
print(queue.get(), forks)
"""


def test_data_loaders_and_the_writers_queue_go_through_it() -> None:
    done = subprocess.run([sys.executable, "-c", LOADER], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["[0, 1, 2, 3, 4, 5, 6, 7]", "written 5"]
