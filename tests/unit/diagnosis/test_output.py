"""A report that can't be written is found before anything is measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from namespaces import in_namespace

from pretrainkit.diagnosis import diagnose
from pretrainkit.diagnosis.program import of_script
from pretrainkit.diagnosis.spec import Spec
from pretrainkit.errors import RequestError

TOOL = Path(__file__).parents[3] / "tools" / "diagnose_speed.py"


def test_an_output_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = of_script(f"{sys.executable} -c pass")
    with pytest.raises(RequestError, match="Not a directory"):
        diagnose.diagnose(diagnose.Request(program, tmp_path / "file" / "report", Spec()))


def test_an_output_on_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, TOOL, "--script", f"{sys.executable} -c pass", "--output", tmp_path]
    done = in_namespace(f"mount -t tmpfs -o ro none {tmp_path}", command)
    assert done.returncode == 2 and "can't be written: Read-only file system" in done.stderr
