"""What starts ranks passes on their exit code and every signal, and leaves nothing running.

The ranks are small scripts: how a run ends is decided here, not by the training.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tiny_runs

pytestmark = pytest.mark.integration
DEADLINE_S = 240

RANK = """
import ctypes, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # as train.py: the death of its parent asks it to stop
rank, mode = int(os.environ["RANK"]), sys.argv[2]
print("rank", rank, "of", os.environ["WORLD_SIZE"], sys.argv[3:], flush=True)
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if mode == "end":
    helper.kill()
    sys.exit(0)
if mode == "fail":
    if rank == 1:
        print("the reason of rank 1", file=sys.stderr)
        sys.exit(7)
if mode == "die" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
from pretrainkit.signals import RankStopRequests
requests = RankStopRequests()
requests.begin_steps()
print("ready", flush=True)
while not requests.asked or mode == "hang":
    time.sleep(0.05)
if mode == "save":
    assert helper.poll() is None, "a rank's own children must live until it has saved"
time.sleep(0.5 * rank)
print("saved", flush=True)
sys.exit(85)
"""
START = """
import sys
from pathlib import Path
from tiny_runs import tiny_run
from pretrainkit import logs
from pretrainkit.launch.local import LaunchPlan, run_attempt
logs.configure()
experiment, script, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
class Plan(LaunchPlan):
    rank_command = property(lambda self: [sys.executable, str(script), "--run", mode, 'a b', '$HOME $$ "c'])
run = tiny_run(experiment, world_size=2)
plan = Plan(run, experiment / "run.json", experiment / "logs" / "attempt_1", script)
sys.exit(run_attempt(plan))
"""


class Attempt:
    """A started attempt and what can be seen of it."""

    def __init__(self, folder: Path, command: list[str], **environment: str) -> None:
        self.log_dir = folder / "logs" / "attempt_1"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        with (folder / "terminal").open("wb") as terminal:
            self.process = subprocess.Popen(
                command,
                stdout=terminal,
                stderr=terminal,
                env={**os.environ, **environment},
                start_new_session=True,
                # Started in the background by a shell script, a process has Ctrl-C switched off, and so its children.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        self._folder = folder

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"{what}\n{self.terminal}"
            time.sleep(0.05)

    def wait_for_ranks(self) -> None:
        files = [self.log_dir / f"rank_{rank}.out" for rank in (0, 1)]
        self.wait_until(lambda: all(file.exists() and "ready" in file.read_text() for file in files), "ready ranks")

    def wait(self) -> int:
        return self.process.wait(timeout=DEADLINE_S)

    @property
    def terminal(self) -> str:
        return (self._folder / "terminal").read_text()

    @property
    def outcome(self) -> dict:
        return json.loads((self.log_dir / "outcome.json").read_text())

    def processes(self) -> list[psutil.Process]:
        """Every living process that names this attempt's folder, and their descendants."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self._folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found |= {process, *process.children(recursive=True)}
        return list(found)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "rank.py").write_text(RANK)
    yield tmp_path
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(tmp_path) in " ".join(process.cmdline()):
                process.kill()


@pytest.fixture
def node(folder: Path) -> Callable[[str], Attempt]:
    """Start the process of one node directly."""

    def start(mode: str) -> Attempt:
        words = ["--ranks", "2", "--experiment_dir", str(folder), "--log_dir", str(folder / "logs" / "attempt_1")]
        script = [str(folder / "rank.py"), "--run", mode, "a b", '$HOME $$ "c']
        return Attempt(folder, [sys.executable, "-m", "pretrainkit.launch.node", *words, "--", *script])

    return start


@pytest.fixture
def launcher(folder: Path) -> Callable[[str], Attempt]:
    """Start an attempt through NeMo-Run."""

    def start(mode: str) -> Attempt:
        for name in ("torchrun", "python"):  # those of another environment, first in PATH
            other = folder / "bin" / name
            other.parent.mkdir(exist_ok=True)
            other.write_text("#!/bin/sh\nexit 99\n")
            other.chmod(0o755)
        command = [sys.executable, "-c", START, str(folder), str(folder / "rank.py"), mode]
        support = f"{Path(tiny_runs.__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
        return Attempt(folder, command, PATH=f"{folder / 'bin'}:{os.environ['PATH']}", PYTHONPATH=support)

    return start


@pytest.mark.parametrize(
    ("mode", "exit_code", "reason"), [("end", 0, ""), ("fail", 7, "rank 1 failed"), ("die", 1, "SIGKILL")]
)
def test_the_exit_code_of_the_ranks_is_passed_on(
    node: Callable[[str], Attempt], mode: str, exit_code: int, reason: str
) -> None:
    attempt = node(mode)
    assert attempt.wait() == exit_code == attempt.outcome["exit_code"]
    assert reason in attempt.outcome["reason"]
    assert attempt.processes() == []
    if mode == "end":  # a rank that fails at once may end the other before it has said a word
        assert """rank 0 of 2 ['a b', '$HOME $$ "c']""" in (attempt.log_dir / "rank_0.out").read_text()
    if mode == "fail":
        assert "the reason of rank 1" in (attempt.log_dir / "node.log").read_text()


def test_ranks_that_started_are_ended_if_another_cannot(node: Callable[[str], Attempt], folder: Path) -> None:
    (folder / "logs" / "attempt_1" / "rank_1.out").mkdir(parents=True)
    attempt = node("save")
    assert attempt.wait() == 1
    assert "the ranks could not be started: [Errno 21] Is a directory" in attempt.outcome["reason"]
    assert attempt.processes() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_lets_the_ranks_save(node: Callable[[str], Attempt], number: int) -> None:
    attempt = node("save")
    attempt.wait_for_ranks()
    attempt.process.send_signal(number)
    assert attempt.wait() == 85
    assert attempt.processes() == []
    assert "saved" in (attempt.log_dir / "rank_0.out").read_text()
    assert "torch/" not in (attempt.log_dir / "node.log").read_text()  # whose words are those for a failure


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("pause_s", [0, 0.15])
def test_a_signal_that_comes_to_every_process_and_again_lets_the_ranks_save(
    launcher: Callable[[str], Attempt], number: int, pause_s: float
) -> None:
    attempt = launcher("save")
    attempt.wait_for_ranks()
    for _ in range(4):
        for process in attempt.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        time.sleep(pause_s)
    assert attempt.wait() == 85, attempt.terminal
    assert attempt.processes() == []
    assert all("saved" in (attempt.log_dir / f"rank_{rank}.out").read_text() for rank in (0, 1))


def test_a_signal_to_every_process_before_the_node_process_listens_is_a_stop(
    launcher: Callable[[str], Attempt],
) -> None:
    attempt = launcher("save")

    def nodes() -> list[psutil.Process]:
        found = []
        for process in attempt.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # the start has short-lived children
                found += [process] if "pretrainkit.launch.node" in process.cmdline() else []
        return found

    attempt.wait_until(lambda: bool(nodes()), "a node process")
    for process in [*nodes(), psutil.Process(attempt.process.pid)]:
        process.terminate()
    assert attempt.wait() == 85, attempt.terminal
    assert attempt.processes() == []


def test_a_second_ctrl_c_kills(launcher: Callable[[str], Attempt]) -> None:
    attempt = launcher("hang")
    attempt.wait_for_ranks()
    attempt.process.send_signal(signal.SIGINT)
    attempt.wait_until(lambda: "sending SIGTERM" in (attempt.log_dir / "node.log").read_text(), "the first signal")
    time.sleep(1)
    attempt.process.send_signal(signal.SIGINT)
    assert attempt.wait() == 1
    assert attempt.processes() == [] and "killed" in attempt.outcome["reason"]


def test_signals_after_the_end_do_not_change_the_exit_code(node: Callable[[str], Attempt]) -> None:
    attempt = node("save")
    attempt.wait_for_ranks()
    attempt.process.send_signal(signal.SIGTERM)
    attempt.wait_until((attempt.log_dir / "outcome.json").exists, "the outcome")
    while attempt.process.poll() is None:  # the interpreter ends, and takes its time
        attempt.process.send_signal(signal.SIGUSR2)
        time.sleep(0.002)
    assert attempt.wait() == 85


def test_two_attempts_at_once_find_ports_though_the_usual_one_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # taken by another is as good
            taken.bind(("localhost", 29500))
        attempts = []
        for name in ("a", "b"):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "rank.py").write_text(RANK)
            words = ["--ranks", "2", "--experiment_dir", str(folder), "--log_dir", str(folder / "logs" / "attempt_1")]
            script = [str(folder / "rank.py"), "--run", "end"]
            attempts.append(Attempt(folder, [sys.executable, "-m", "pretrainkit.launch.node", *words, "--", *script]))
        assert [attempt.wait() for attempt in attempts] == [0, 0]


def test_nemo_run_starts_the_ranks_and_their_output_is_followed(
    launcher: Callable[[str], Attempt], folder: Path
) -> None:
    attempt = launcher("end")
    assert attempt.wait() == 0, attempt.terminal
    assert """rank 0 of 2 ['a b', '$HOME $$ "c']""" in attempt.terminal
    assert list((folder / ".nemo_run" / "experiments").rglob("_TASKS"))


def test_ctrl_c_at_the_launcher_lets_the_ranks_save(launcher: Callable[[str], Attempt]) -> None:
    attempt = launcher("save")
    attempt.wait_for_ranks()
    attempt.process.send_signal(signal.SIGINT)
    assert attempt.wait() == 85
    assert attempt.processes() == []
    assert "a second Ctrl-C" in attempt.terminal and "stopped as asked" in attempt.terminal


def test_a_killed_launcher_lets_the_ranks_save_and_end(launcher: Callable[[str], Attempt]) -> None:
    attempt = launcher("save")
    attempt.wait_for_ranks()
    attempt.process.kill()
    attempt.wait()
    attempt.wait_until(lambda: (attempt.log_dir / "outcome.json").exists(), "an outcome")
    assert attempt.outcome["exit_code"] == 85
    attempt.wait_until(lambda: attempt.processes() == [], "no process left")


def test_ranks_of_a_killed_node_process_save_and_none_is_left(launcher: Callable[[str], Attempt]) -> None:
    attempt = launcher("save")
    attempt.wait_for_ranks()
    os.kill(int((attempt.log_dir / "node.pid").read_text()), signal.SIGKILL)
    assert attempt.wait() == 1
    assert attempt.processes() == []
    assert "died" in attempt.terminal
    assert all("saved" in (attempt.log_dir / f"rank_{rank}.out").read_text() for rank in (0, 1))
