"""A program under diagnosis may write and delete as it likes: every file is afterwards as it was."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.diagnosis import sandbox

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
TOOL = [sys.executable, str(ROOT / "tools" / "diagnose_speed.py")]

LOOP = """
import os, sys, time
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000_000
    def __getitem__(self, index):
        return torch.zeros(16)

def train(rank=0, world_size=1, address=None):
    if world_size > 1:
        torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    model = torch.nn.Linear(16, 16)
    if world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(Rows(), batch_size=8):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

WAYS = """
import shutil, sys
if __name__ == "__main__":
    shutil.rmtree("out/old")  # before torch is known
import ctypes, mmap, os, pathlib, sqlite3, subprocess
import numpy as np
import pyarrow, pyarrow.parquet
import safetensors.numpy
import torch

def write_as_rank(rank):
    pathlib.Path(f"out/rank_{rank}").write_text("x")
    os.remove(f"out/of_rank_{rank}")

def main():
    open("out/opened", "w").close()
    with open("out/appended", "a") as file:
        file.write("more")
    descriptor = os.open("out/truncated", os.O_RDWR | os.O_TRUNC)
    os.write(descriptor, b"x")
    os.close(descriptor)
    with open("out/mapped", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[:3] = b"xyz"
    np.memmap("out/memmap", np.uint8, "r+", shape=4)[:] = 9
    os.truncate("out/cut", 1)
    os.rename("out/renamed", "out/other")
    os.replace("out/keep", "out/replaced")
    pathlib.Path("out/unlinked").unlink()
    os.chmod("out/mode", 0o400)
    os.utime("out/time", (1, 1))
    os.symlink("keep", "out/link")
    os.link("out/linked", "out/hard")
    pathlib.Path("out/through").write_text("written by its link")
    os.makedirs("out/checkpoint-10")
    database = sqlite3.connect("out/runs.db")
    database.execute("insert into runs values (2)")
    database.commit()
    database.close()
    subprocess.run("echo x > out/shell; rm out/by_shell; sed -i s/a/b/ out/edited", shell=True, check=True)
    safetensors.numpy.save_file({"a": np.zeros(2)}, "out/model.safetensors")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), "out/rows.parquet")
    torch.save({}, "out/state.pt")
    ctypes.CDLL(None).unlink(b"out/by_libc")
    shutil.copyfile("out/linked", "out/copied_over")
    for place in ("/dev/shm", "/var/tmp", os.path.expanduser("~")):
        pathlib.Path(place, "diagnosis-was-here").write_text("x")
    context = torch.multiprocessing.get_context(sys.argv[1])
    ranks = [context.Process(target=write_as_rank, args=(rank,)) for rank in range(2)]
    [rank.start() for rank in ranks]
    assert [rank.join() or rank.exitcode for rank in ranks] == [0, 0]
    # A daemon that outlives its parent.
    subprocess.Popen(["sh", "-c", "sleep 3; echo x > out/late"], start_new_session=True)
    # What was written is there for the program.
    assert sorted(os.listdir("out/checkpoint-10")) == [] and not os.path.exists("out/old")
    assert open("out/appended").read() == "itmore" and os.path.getsize("out/truncated") == 1

if __name__ == "__main__":
    main()
    if "wait" in sys.argv:
        import time
        time.sleep(600)
    sys.path.insert(0, ".")
    import loop
    loop.train()
"""
FILES = (
    *("opened", "appended", "truncated", "mapped", "memmap", "cut", "renamed", "keep", "replaced", "unlinked", "mode"),
    *("time", "linked", "by_shell", "edited", "by_libc", "copied_over", "of_rank_0", "of_rank_1", "model.safetensors"),
)


def state(folder: Path) -> dict[str, object]:
    """All names below a folder, with what is there: content, mode, times, links."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(info.st_mode) else path.readlink() if path.is_symlink() else None
        found[str(path)] = (content, info.st_mode, info.st_mtime_ns, info.st_ino, info.st_nlink)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a program trains, with outputs of earlier runs."""
    import sqlite3

    out = tmp_path / "work" / "out"
    (out / "old" / "checkpoint").mkdir(parents=True)
    (out / "old" / "checkpoint" / "weights").write_bytes(b"precious")
    for name in FILES:
        (out / name).write_text("it" if name == "appended" else "what was there")
    (tmp_path / "elsewhere").write_text("linked to")
    (out / "through").symlink_to(tmp_path / "elsewhere")
    database = sqlite3.connect(out / "runs.db")
    database.execute("create table runs (a)")
    database.commit()
    database.close()
    (tmp_path / "work" / "loop.py").write_text(LOOP)
    (tmp_path / "work" / "ways.py").write_text(WAYS)
    return tmp_path / "work"


def diagnose(folder: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command on a script, as short as it can be."""
    options = ["--output", str(folder.parent / "report"), "--probes", "threads", "--budget_s", "3", *words]
    return subprocess.run(
        [*TOOL, "--script", script, *options],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )


def report(folder: Path) -> dict[str, Any]:
    """What the command has written."""
    return json.loads((folder.parent / "report" / "report.json").read_text())


def test_a_program_writes_and_deletes_and_everything_is_as_before(folder: Path) -> None:
    before = state(folder.parent)
    done = diagnose(folder, f"{sys.executable} ways.py spawn")
    time.sleep(3.2)  # the daemon would have written by now
    shutil.rmtree(folder.parent / "report")
    assert done.returncode == 0, done.stderr
    after = state(folder.parent)
    assert after == before
    for place in ("/dev/shm", "/var/tmp", Path.home()):
        assert not Path(place, "diagnosis-was-here").exists()


def test_an_interrupted_diagnosis_leaves_nothing(folder: Path) -> None:
    before = state(folder)
    process = subprocess.Popen(
        [*TOOL, "--script", f"{sys.executable} ways.py fork wait", "--output", str(folder.parent / "report")],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 1
    assert state(folder) == before
    assert not [path for path in Path("/proc").glob("[0-9]*/cwd") if _is_in(path, folder)]


def _is_in(link: Path, folder: Path) -> bool:
    try:
        return link.readlink() == folder
    except OSError:
        return False


STARTS = {
    "fork": "context('fork')",
    "spawn": "torch.multiprocessing.spawn(train, (2, address), 2)",
    "forkserver": "context('forkserver')",
}
STARTER = """
from loop import *
def context(name):
    made = torch.multiprocessing.get_context(name)
    ranks = [made.Process(target=train, args=(rank, 2, address)) for rank in range(2)]
    [rank.start() for rank in ranks]
    [rank.join() for rank in ranks]
if __name__ == "__main__":
    address = "file://" + os.path.abspath("meeting")
"""


@pytest.mark.parametrize("start", STARTS)
def test_children_of_every_start_method_are_measured(start: str, folder: Path) -> None:
    (folder / "loop.py").write_text(LOOP + "if __name__ == '__main__': train()\n")
    (folder / "starter.py").write_text(STARTER + "    " + STARTS[start])
    done = diagnose(folder, f"{sys.executable} starter.py")
    assert done.returncode == 0, done.stderr
    assert report(folder)["speed"]["ranks"] == 2
    assert not (folder / "meeting").exists()


def test_training_that_cannot_be_measured_is_named_within_seconds(folder: Path) -> None:
    (folder / "loop.py").write_text(LOOP + "if __name__ == '__main__': train()\n")
    begin_s = time.monotonic()
    done = diagnose(folder, f"{sys.executable} -I loop.py")
    assert done.returncode == 1
    assert "can't be measured" in done.stderr and "-I loop.py" in done.stderr, done.stderr
    assert time.monotonic() - begin_s < 60


def test_without_namespaces_the_program_is_refused_and_not_started(folder: Path) -> None:
    """In a namespace that allows none below it."""
    (folder / "loop.py").write_text("open('started', 'w')")
    words = [*TOOL, "--script", "loop.py", "--output", str(folder.parent / "report")]
    limited = ["unshare", "-Ur", "sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"', "sh", *words]
    done = subprocess.run(limited, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "user namespaces are off" in done.stderr and "--in_place" in done.stderr
    assert not (folder / "started").exists()


STACKED = """
set -e
for level in 1 2; do
    mkdir upper$level work$level
    mount -t overlay o -o lowerdir=place,upperdir=upper$level,workdir=work$level,userxattr place
done
cd place
exec "$@"
"""


def test_where_no_overlay_is_possible_the_program_has_a_copy(tmp_path: Path) -> None:
    """Overlays can't be stacked more than twice."""
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "log").write_text("old")
    scratch = Path(tempfile.mkdtemp())
    (scratch / "results").mkdir()
    try:
        words = sandbox.command(["sh", "-c", "echo new > log; cat log"], scratch, keep=scratch / "results")
        stacked = ["unshare", "-Urm", "sh", "-c", STACKED, "sh", "sh", "-c"]
        done = subprocess.run(
            [*stacked, f"{shlex.join(words)} && cat log"], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.stdout.split() == ["new", "old"], done.stderr
        places = sandbox.read_only_places(scratch / "results")
        assert places == [str(tmp_path / "place"), f"{tmp_path / 'place'}: the program had a copy of it"]
    finally:
        sandbox.remove(scratch)
