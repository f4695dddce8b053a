"""Files and folders appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pretrainkit import files


class Interrupted(Exception):
    """What stops a writer in the middle."""


def test_several_files_get_their_names_all_or_none(tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("a", "b", "c")]
    new = [tmp_path / f"{path.name}.new" for path in names]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:  # another file system: renaming to it fails
        for text, last in (("old", names[2]), ("new", Path(elsewhere) / "c")):
            for path in new:
                path.write_text(text)
            moves = [*zip(new, [*names[:2], last], strict=True)]
            if text == "old":
                files.commit_all(moves)
                continue
            with pytest.raises(OSError, match="cross-device"):
                files.commit_all(moves, stale=[names[2]])
    assert [path.read_text() for path in names] == ["old"] * 3
    assert [path.read_text() for path in new] == ["new"] * 3
    files.commit_all([*zip(new[:2], names[:2], strict=True)], stale=[names[2]])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "new", "b": "new", "c.new": "new"}


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "new" / "file"
    with files.atomic_file(final) as temporary:
        temporary.write_text("half")
        assert not final.exists() and files.TEMPORARY_MARK in temporary.name
    assert final.read_text() == "half"
    assert list(final.parent.iterdir()) == [final]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    final = tmp_path / "file"
    final.write_text("old")
    with pytest.raises(Interrupted), files.atomic_file(final) as temporary:
        temporary.write_text("half")
        raise Interrupted
    assert final.read_text() == "old" and list(tmp_path.iterdir()) == [final]


def test_a_folder_appears_with_all_of_its_files(tmp_path: Path) -> None:
    final = tmp_path / "folder"
    with files.atomic_folder(final) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("a")
        assert not final.exists()
    assert (final / "sub" / "a").read_text() == "a"
    assert list(tmp_path.iterdir()) == [final]


def test_an_error_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(Interrupted), files.atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "a").write_text("a")
        raise Interrupted
    assert list(tmp_path.iterdir()) == []


def test_a_filled_folder_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("old")
    with pytest.raises(OSError), files.atomic_folder(tmp_path / "folder") as temporary:
        (temporary / "new").write_text("new")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["old"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_killed_writer_leaves_nothing_under_the_final_name(tmp_path: Path, kind: str) -> None:
    target = "temporary" if kind == "file" else "(temporary / 'a')"
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom pretrainkit import files\n"
        f"with files.atomic_{kind}(Path(sys.argv[1])) as temporary:\n"
        f"    {target}.write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "final")])
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "final").exists()


def test_json_keeps_order_and_all_alphabets(tmp_path: Path) -> None:
    value = {"z": 1, "a": ["日本語", None, 1e-05]}
    files.write_json(tmp_path / "x.json", value)
    assert files.read_json(tmp_path / "x.json") == value
    assert list(files.read_json(tmp_path / "x.json")) == ["z", "a"]
    assert "日本語" in (tmp_path / "x.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_sha256_of_any_size(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "x").write_bytes(content)
    assert files.hash_file(tmp_path / "x") == hashlib.sha256(content).hexdigest()


def test_only_leftovers_of_dead_processes_of_this_host_are_removed(tmp_path: Path) -> None:
    final = tmp_path / "model"
    done = subprocess.Popen(["true"])
    done.wait()
    mine = files.temporary_name(final)
    dead = mine.with_name(mine.name.replace(str(os.getpid()), str(done.pid)))
    old = dead.with_name(f"{dead.name}-old")
    elsewhere = final.with_name(f"{final.name}{files.TEMPORARY_MARK}otherhost-{done.pid}")
    for folder in (mine, dead, old, elsewhere):
        folder.mkdir()
        (folder / "part").write_text("x")
    (tmp_path / "model2.tmp-x-1").write_text("another name")
    assert files.remove_leftovers(final) == sorted([mine, elsewhere])
    assert {path.name for path in tmp_path.iterdir()} == {mine.name, elsewhere.name, "model2.tmp-x-1"}


HOLD = """
import sys, time
from pathlib import Path
from pretrainkit import files
with files.locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(lock: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_held_lock_names_its_holder_and_is_free_once_that_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    process = hold(lock)
    with pytest.raises(files.LockHeldError, match=f"process {process.pid} on "), files.locked(lock):
        pass
    process.kill()
    with files.locked(lock, wait=True) as is_held:
        assert is_held
    process.wait()
    with files.locked(lock) as is_held:
        assert is_held and lock.read_text().startswith(f"process {os.getpid()} on ")


def test_without_locks_the_block_runs_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with files.locked(tmp_path / "lock") as is_held:
        assert not is_held
    assert "no file locks here (No locks available)" in caplog.text


def test_polling_gives_what_was_waited_for_or_the_last_value() -> None:
    answers = iter([0, "", "there", "not asked"])
    assert files.wait_until(lambda: next(answers), poll_s=0.01) == "there"
    assert next(answers) == "not asked"
    assert files.wait_until(lambda: False, timeout_s=0.05, poll_s=0.01) is False


def test_samples_see_a_change_with_the_stated_probability(tmp_path: Path) -> None:
    num_windows, row_bytes, num_rows = 64, 8192, 256
    path, size = tmp_path / "tensor", row_bytes * num_rows
    path.write_bytes(bytes(size))

    def digest() -> str:
        return files.hash_samples([(path, 0, size)], num_windows=num_windows)

    before, seen = digest(), 0
    with path.open("r+b", buffering=0) as file:
        for row in range(num_rows):
            os.pwrite(file.fileno(), b"x" * row_bytes, row * row_bytes)
            seen += digest() != before
            os.pwrite(file.fileno(), bytes(row_bytes), row * row_bytes)
    assert seen / num_rows == pytest.approx(num_windows * (row_bytes + files.WINDOW_BYTES) / size, abs=0.05)
    assert digest() == before


def test_the_ends_of_a_range_are_sampled_and_nothing_around_it(tmp_path: Path) -> None:
    path = tmp_path / "tensor"
    path.write_bytes(bytes(10**6))
    before = files.hash_samples([(path, 1000, 999_000)], num_windows=8)
    for place, is_seen in ((999, False), (1000, True), (998_999, True), (999_000, False)):
        with path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"x", place)
            assert (files.hash_samples([(path, 1000, 999_000)], num_windows=8) != before) is is_seen
            os.pwrite(file.fileno(), b"\0", place)
