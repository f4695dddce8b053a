"""Attempts get folders of their own, and two starts of one experiment don't run at once."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretrainkit.errors import RequestError
from pretrainkit.run.folder import LAUNCHER_LOCK, RANKS_LOCK, RunFolder, locked, wait_for_ranks


def test_attempts_are_numbered_on(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.new_attempt_folder() == tmp_path / "logs" / "attempt_1"
    (tmp_path / "logs" / "attempt_10").mkdir()
    (tmp_path / "logs" / "attempt_old").mkdir()
    assert folder.new_attempt_folder().name == "attempt_11"
    assert [path.name for path in folder.attempt_folders()] == ["attempt_1", "attempt_10", "attempt_11"]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that holds a lock of the experiment until its input ends."""
    holders = []

    def start(name: str) -> subprocess.Popen[str]:
        code = (
            "import sys\nfrom pathlib import Path\nfrom pretrainkit.run.folder import RunFolder, locked\n"
            f"with locked(RunFolder(Path({str(tmp_path)!r})), {name!r}):\n"
            "    print('held', flush=True)\n    sys.stdin.read()\n"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        holders.append(holder)
        assert holder.stdout and holder.stdout.readline() == "held\n"
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_a_second_start_is_refused_while_the_first_lives(
    tmp_path: Path, hold: Callable[[str], subprocess.Popen[str]]
) -> None:
    holder = hold(LAUNCHER_LOCK)
    with (
        pytest.raises(RequestError, match=f"running already \\(process {holder.pid} on"),
        locked(RunFolder(tmp_path), LAUNCHER_LOCK),
    ):
        pass
    holder.kill()
    holder.wait()
    with locked(RunFolder(tmp_path), LAUNCHER_LOCK):
        pass


def test_a_start_waits_for_ranks_that_still_save(tmp_path: Path, hold: Callable[[str], subprocess.Popen[str]]) -> None:
    holder = hold(RANKS_LOCK)
    with pytest.raises(RequestError, match="running already"):
        wait_for_ranks(RunFolder(tmp_path), longest_s=0.1)
    threading.Timer(0.5, holder.kill).start()
    wait_for_ranks(RunFolder(tmp_path), longest_s=60)
    assert holder.wait() != 0
