"""A full disk or a kill at any change of the disk: outputs are whole or absent, and a rerun completes them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the faults are made by a library in C"),
]
HERE = Path(__file__).parent
STEP = os.environ.get("PRETRAINKIT_FAULT_STEP", "7")
"""Every which change is tried; 1: all of them."""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "faults.c", "-ldl"], check=True)
    return library


@pytest.mark.parametrize("kind", ["full", "kill"])
@pytest.mark.parametrize("form", ["shards", "packed"])
def test_outputs_are_whole_or_absent_and_a_rerun_completes_them(
    form: str, kind: str, shim: Path, tokenizer_folder: Path, jsonl_file: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(jsonl_file.read_text().splitlines(keepends=True)[:8]) + '{"text": 5}\n')
    words = [form, kind, STEP, source, tokenizer_folder, tmp_path]
    done = subprocess.run(
        [sys.executable, HERE / "shard_faults.py", *map(str, words)],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ changes\n", done.stdout), done.stdout + done.stderr[-2000:]
