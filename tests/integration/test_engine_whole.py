"""The engine works without the packages that are left out while it is imported."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks

pytestmark = pytest.mark.integration


def test_the_engine_is_whole_without_what_is_left_out(tmp_path: Path) -> None:
    ranks.run_ranks(ranks.look_at_imports, 1, tmp_path)


def test_transformer_engine_stays_out_of_a_run_with_torchs_layers(
    tmp_path: Path, make_hf_llama: Callable[..., Path], write_tiny_run: Callable[..., Path]
) -> None:
    package = tmp_path / "path" / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nraise ImportError('no GPU')\n")
    paths = os.pathsep.join((str(package.parent), os.environ.get("PYTHONPATH", "")))
    run_file = write_tiny_run(make_hf_llama(), "torch", max_steps=1, layer_spec="torch")
    train = Path(__file__).parents[2] / "pretraining" / "train.py"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    place |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, str(train), "--run", str(run_file)],
        env=os.environ | {"PYTHONPATH": paths} | place,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()
