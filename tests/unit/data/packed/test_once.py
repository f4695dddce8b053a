"""Who prepares when another node's preparer is alive, silent, or gone."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pretrainkit import files
from pretrainkit.data.packed import once
from pretrainkit.data.packed.once import build_once
from pretrainkit.errors import DataError, StoppedError


def prepare(final: Path, **settings: float) -> bool:
    return build_once(final, final.exists, final.mkdir, **settings)


def test_the_first_prepares_and_the_next_finds_it_ready(tmp_path: Path) -> None:
    assert prepare(tmp_path / "set") and not prepare(tmp_path / "set")
    assert not (tmp_path / "set.preparing").exists()


def fail(final: Path) -> bool:
    def build() -> None:
        raise DataError("no space")

    return build_once(final, final.exists, build)


def test_who_waits_for_a_builder_that_fails_fails_with_its_error(tmp_path: Path) -> None:
    final, began = tmp_path / "set", threading.Event()

    def build() -> None:
        began.set()
        time.sleep(0.5)
        raise DataError("no space")

    def run() -> None:
        with pytest.raises(DataError, match="no space"):
            build_once(final, final.exists, build)

    builder = threading.Thread(target=run)
    builder.start()
    began.wait()
    with pytest.raises(DataError, match=rf"process {os.getpid()} on .* could not build it: no space"):
        prepare(final)
    builder.join()
    assert prepare(final), "a later start tries again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "set.lock"]


def test_a_late_rank_of_a_start_that_failed_does_not_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("SLURM_STEP_ID", "7")
    with pytest.raises(DataError, match=r"^no space"):
        fail(tmp_path / "set")
    with pytest.raises(DataError, match="could not build it: no space"):
        prepare(tmp_path / "set")
    monkeypatch.setenv("SLURM_STEP_ID", "8")
    assert prepare(tmp_path / "set")


def test_a_stop_is_taken_over(tmp_path: Path) -> None:
    def stop() -> None:
        raise StoppedError("SIGTERM")

    with pytest.raises(StoppedError):
        build_once(tmp_path / "set", (tmp_path / "set").exists, stop)
    assert not (tmp_path / "set.failed").exists() and prepare(tmp_path / "set")


def test_a_pool_may_fork_since_the_heartbeat_begins_after_it(tmp_path: Path) -> None:
    final = tmp_path / "set"
    threads: list[int] = []

    @contextmanager
    def pool() -> Iterator[None]:
        threads.append(threading.active_count())
        yield
        assert final.exists() and threading.active_count() == threads[0]

    assert build_once(final, final.exists, final.mkdir, pool=pool())
    assert threads == [threading.active_count()]


def test_a_living_preparer_of_another_node_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "SILENCE_S", 1.0)
    heartbeat, final = tmp_path / "set.preparing", tmp_path / "set"
    heartbeat.write_text(json.dumps({"host": "another-node", "pid": 1}))

    def live() -> None:
        for _ in range(8):
            time.sleep(0.25)
            os.utime(heartbeat)
        final.mkdir()

    other = threading.Thread(target=live)
    other.start()
    assert not prepare(final)
    other.join()


def test_a_silent_preparer_of_another_node_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "SILENCE_S", 0.5)
    (tmp_path / "set.preparing").write_text(json.dumps({"host": "another-node", "pid": 1}))
    assert prepare(tmp_path / "set")


def test_what_a_preparer_left_that_died_after_its_work_is_cleared(tmp_path: Path) -> None:
    final, staging, heartbeat = (tmp_path / name for name in ("set", "set.staging-1", "set.preparing"))
    final.mkdir()

    def again() -> bool:
        staging.mkdir(exist_ok=True)
        return build_once(final, final.exists, final.rmdir, leftovers=lambda: [staging])

    heartbeat.write_text(json.dumps({"host": socket.gethostname(), "pid": 1}))
    with files.locked(tmp_path / "set.lock") as got:
        assert got and not again()
        assert heartbeat.exists() and staging.exists()  # it lives, and clears them itself
    assert not again()
    assert not heartbeat.exists() and not staging.exists() and final.exists()
    heartbeat.write_text(json.dumps({"host": "another-node", "pid": 1}))
    assert not again()
    assert heartbeat.exists() and staging.exists()  # it may live: locks don't reach all nodes


def test_waiting_ends(tmp_path: Path) -> None:
    (tmp_path / "set.preparing").write_text(json.dumps({"host": "another-node", "pid": 1}))
    with pytest.raises(DataError, match="not ready after"):
        prepare(tmp_path / "set", timeout_s=0.3)
