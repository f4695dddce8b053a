"""A program under diagnosis writes into a scratch folder, and finds there what it wrote."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pretrainkit.diagnosis.observe.guard import Redirection, old_temporary_entries

PROGRAM = """
import os, pathlib, shutil, sys, tempfile
import torch
from pretrainkit.diagnosis.observe import guard
guard.install(pathlib.Path(sys.argv[1]) / "outputs", [sys.argv[3]])
out = pathlib.Path(sys.argv[2])
if sys.argv[4] == "other rank":
    assert (out / "cache.bin").exists() and open(out / "cache.bin").read() == "tokens"
    assert (out / "log.txt").read_text() == "old"
    sys.exit()
assert not (out / "cache.bin").exists()
(out / "cache.bin").write_text("tokens")
with open(out / "log.txt", "a") as file:
    file.write("more")
assert open(out / "log.txt").read() == "old" + "more"
(out / "new.txt").write_text("x")
assert (out / "new.txt").stat().st_size == 1
torch.save({"a": 1}, out / "model.pt")
open(out / "part.tmp", "w").close()
os.replace(out / "part.tmp", out / "state.json")
os.remove(out / "log.txt")
(out / "keep.txt").unlink()
os.rename(out / "keep.txt", out / "renamed.txt")
shutil.rmtree(out / "folder")
os.makedirs(out / "new" / "deep")
(out / "new" / "deep" / "a.txt").write_text("x")
(out / "done").touch()
assert (out / "done").exists()
(out / "keep.txt").touch()
shutil.copy2(out / "new.txt", out / "copied.txt")
assert open(out / "copied.txt").read() == "x"
os.chmod(out / "keep.txt", 0o600)
os.symlink("new.txt", out / "latest")
os.close(os.open(out / "opened", os.O_CREAT | os.O_WRONLY))
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "a").mkdir()
    pathlib.Path(folder, "a", "b").write_text("x")
assert not os.path.exists(folder)
"""


def state(folder: Path) -> dict[str, object]:
    """All names below a folder, with what files hold, their mode and time."""
    found = {path.relative_to(folder): path for path in folder.rglob("*")}
    return {
        str(name): (path.read_text(), path.stat().st_mode, path.stat().st_mtime_ns) if path.is_file() else None
        for name, path in found.items()
    }


@pytest.mark.parametrize("place", ["temporary", "elsewhere"])
def test_outputs_stay_as_they_are(tmp_path: Path, place: str) -> None:
    """What was in a temporary folder before is as safe as anything elsewhere."""
    out = tmp_path / "run" if place == "temporary" else Path(__file__).parents[3] / "build" / f"guarded-{os.getpid()}"
    (out / "folder").mkdir(parents=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    # pytest's own folder stands right below the temporary one.
    entry = (
        Path(tempfile.gettempdir()).resolve()
        / tmp_path.resolve().relative_to(Path(tempfile.gettempdir()).resolve()).parts[0]
    )
    try:
        for name, text in {"log.txt": "old", "keep.txt": "kept", "state.json": "{}", "folder/a": "a"}.items():
            (out / name).write_text(text)
        before = state(out)
        for rank in ("first rank", "other rank"):
            done = subprocess.run(
                [sys.executable, "-c", PROGRAM, str(scratch), str(out), str(entry), rank],
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            assert state(out) == before
    finally:
        shutil.rmtree(out)


def test_caches_and_devices_are_free(tmp_path: Path) -> None:
    moved = Redirection(tmp_path / "outputs")
    for path in ("/dev/null", "/tmp/x", str(Path.home() / ".cache" / "huggingface" / "x")):
        assert moved.target(path, keep=False) == path
    assert moved.target(3, keep=False) == 3


def test_new_things_in_a_temporary_folder_are_free_and_old_ones_are_not(tmp_path: Path) -> None:
    moved = Redirection(tmp_path / "outputs", ["/tmp/old-run"])
    assert moved.target("/tmp/new-run/a", keep=False) == "/tmp/new-run/a"
    assert moved.target("/tmp/old-run/a", keep=False) == str(tmp_path / "outputs") + "/tmp/old-run/a"
    assert any(entry.startswith(tempfile.gettempdir()) for entry in old_temporary_entries())
