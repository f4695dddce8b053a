"""A rank hears the signals of a scheduler, and the processes that work for it go on."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

RANK = """
import os, signal, subprocess, sys, time
from pretrainkit import logs
from pretrainkit.training.stop_requests import StopRequests
logs.configure()
requests = StopRequests()
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2], ids=lambda number: number.name)
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
