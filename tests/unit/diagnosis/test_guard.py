"""A program under diagnosis writes into a scratch folder, and finds there what it wrote."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pretrainkit.diagnosis.guard import Redirection

PROGRAM = """
import os, pathlib, shutil, sys, tempfile
import torch
from pretrainkit.diagnosis import guard
guard.install(pathlib.Path(sys.argv[1]) / "outputs")
out = pathlib.Path(sys.argv[2])
with open(out / "log.txt", "a") as file:
    file.write("more")
assert open(out / "log.txt").read() == "old" + "more"
(out / "new.txt").write_text("x")
torch.save({"a": 1}, out / "model.pt")
open(out / "part.tmp", "w").close()
os.replace(out / "part.tmp", out / "state.json")
os.remove(out / "log.txt")
(out / "keep.txt").unlink()
os.rename(out / "keep.txt", out / "renamed.txt")
shutil.rmtree(out / "folder")
os.makedirs(out / "new" / "deep")
(out / "new" / "deep" / "a.txt").write_text("x")
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "a").mkdir()
    pathlib.Path(folder, "a", "b").write_text("x")
assert not os.path.exists(folder)
"""


def test_outputs_stay_as_they_are(tmp_path: Path) -> None:
    # Temporary folders are free; so the outputs need another place.
    out = Path(__file__).parents[3] / "build" / f"guarded-{os.getpid()}"
    if str(out).startswith(("/tmp/", "/var/tmp/")):
        pytest.skip("the checkout lies in a temporary folder, where programs may write")
    (out / "folder").mkdir(parents=True)
    try:
        before = {"log.txt": "old", "keep.txt": "kept", "state.json": "{}", "folder/a": "a"}
        for name, text in before.items():
            (out / name).write_text(text)
        done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), str(out)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        after = {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}
        assert after == before
        assert not (out / "new").exists()
    finally:
        shutil.rmtree(out)


def test_caches_and_devices_are_free(tmp_path: Path) -> None:
    moved = Redirection(tmp_path / "outputs")
    for path in ("/dev/null", "/tmp/x", str(Path.home() / ".cache" / "huggingface" / "x")):
        assert moved.target(path, keep=False) == path
    assert moved.target(3, keep=False) == 3
