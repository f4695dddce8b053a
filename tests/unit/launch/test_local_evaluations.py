"""A run on this machine evaluates what is due while its ranks train, one process at a time, and the rest at its end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pretrainkit import files
from pretrainkit.launch import evaluations
from pretrainkit.run.folder import RunFolder

COUNT = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with (folder / "starts").open("a") as file:
    file.write("x")
time.sleep(float(sys.argv[2]))
for due in folder.glob("*.due"):
    due.with_suffix(".json").write_text("{}")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(evaluations, "_POLL_S", 0.05)
    (tmp_path / "evaluations").mkdir()
    return RunFolder(tmp_path)


def command(folder: RunFolder, seconds: float) -> list[str]:
    return [sys.executable, "-c", COUNT, str(folder.evaluations), str(seconds)]


def test_what_becomes_due_is_evaluated_by_one_process_at_a_time(folder: RunFolder) -> None:
    starts = folder.evaluations / "starts"
    with evaluations.evaluated_meanwhile(folder, command(folder, 0.3), os.environ):
        for step in (1, 2):
            (folder.evaluations / f"step_0000000{step}.due").touch()
        assert files.wait_until(lambda: len(list(folder.evaluations.glob("*.json"))) == 2, timeout_s=20)
    assert starts.read_text() == "x"


def test_the_process_ends_with_the_run_and_the_rest_is_done_then(folder: RunFolder) -> None:
    (folder.evaluations / "step_00000001.due").touch()
    with evaluations.evaluated_meanwhile(folder, command(folder, 60), os.environ):
        assert files.wait_until((folder.evaluations / "starts").exists, timeout_s=20)
    assert not list(folder.evaluations.glob("*.json"))
    evaluations.evaluate_rest(folder, command(folder, 0), os.environ)
    assert list(folder.evaluations.glob("*.json"))
