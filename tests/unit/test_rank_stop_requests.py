"""A rank hears the signals of a scheduler, and the processes that work for it go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from pretrainkit.signals import JOB_START_VARIABLE, STOP_SIGNALS

RANK = """
import os, signal, subprocess, sys, time
from pretrainkit import logs
from pretrainkit.signals import RankStopRequests
logs.configure()
requests = RankStopRequests()
program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
forked = os.fork()
if forked == 0:
    time.sleep(60)
    os._exit(0)
if sys.argv[1] == "steps":
    requests.begin_steps()
print(program.pid, forked, flush=True)
while not requests.asked:
    time.sleep(0.01)
time.sleep(0.2)
print(program.poll() is None and os.waitpid(forked, os.WNOHANG) == (0, 0), flush=True)
program.kill()
os.kill(forked, signal.SIGKILL)
sys.exit(85)
"""


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_only_the_rank_hears(number: signal.Signals) -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK, "steps"], stdout=subprocess.PIPE, text=True)
    assert rank.stdout
    others = [int(word) for word in rank.stdout.readline().split()]
    for process in [*others, rank.pid]:
        subprocess.run(["kill", f"-{number.value}", str(process)], check=True)
    assert rank.stdout.read() == "True\n"
    assert rank.wait() == 85


def test_before_the_first_step_a_signal_ends_the_rank() -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK, "no steps"], stdout=subprocess.PIPE, text=True)
    assert rank.stdout
    others = rank.stdout.readline().split()
    rank.terminate()
    assert rank.wait() == 85
    subprocess.run(["kill", "-KILL", *others], check=True)


def test_a_time_that_is_over_before_the_first_step_is_an_error() -> None:
    program = (
        "from pretrainkit.signals import RankStopRequests, count_time_from_here\n"
        "count_time_from_here()\n"
        "requests = RankStopRequests()\n"
        "requests.limit_time('0:30:00', '0:05:00')\n"
        "requests.begin_steps()\n"
        "assert not requests.asked\n"
    )
    for began_s, is_over in ((time.time() - 1600, True), (time.time() - 1400, False), (None, False)):
        variables = {JOB_START_VARIABLE: str(began_s)} if began_s else {}
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, **variables}, capture_output=True, text=True
        )
        assert ("StoppedError: --time_limit: " in done.stderr) == is_over == bool(done.returncode), done.stderr
