"""convert_checkpoint.py as a user types it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "tools/convert_checkpoint.py", *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_there_and_back(
    make_model: Callable[..., Path], assert_same: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    source = make_model("mixtral")
    there = run(
        *(source, tmp_path / "torch", "--target_format", "torch", "--json"),
        *("--target-tensor-parallel-size", 2, "--target_pipeline_parallel_size", 3, "--target-expert-parallel-size=4"),
        *("--target-first-stage-layers", 1, "--target-last-stage-layers", 1, "--make-vocab-size-divisible-by", 64),
    )
    assert there.returncode == 0, there.stderr
    report = json.loads(there.stdout)
    assert report["shape"]["num_experts"] == 8 and "121 padding rows" in report["notes"][0]
    back = run(tmp_path / "torch", tmp_path / "back", "--max-shard-size", "300KB", "--quiet")
    assert back.returncode == 0 and "mixtral" in back.stdout and not back.stderr
    assert_same(source, tmp_path / "back")


def test_weights_that_are_not_finite_are_refused_with_their_counts(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = shutil.copytree(make_model("llama"), tmp_path / "hf")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][:3] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    done = run(source, tmp_path / "out")
    assert done.returncode == 1 and "model.norm.weight (3 NaN)" in done.stderr and not (tmp_path / "out").exists()
    allowed = run(source, tmp_path / "out", "--allow-nonfinite")
    assert allowed.returncode == 0 and "not finite: model.norm.weight (3 NaN)" in allowed.stdout


def test_wrong_request_is_told_without_a_traceback(make_model: Callable[..., Path], tmp_path: Path) -> None:
    done = run(make_model("llama"), tmp_path / "out", "--target-format", "torch", "--target-pipeline-parallel-size", 3)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "--target-first-stage-layers" in done.stderr
    assert not done.stdout and not list(tmp_path.iterdir())
