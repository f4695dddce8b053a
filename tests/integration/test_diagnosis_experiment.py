"""An experiment is diagnosed by its own code, stays as it is, and the numbers are those of metrics.jsonl."""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.diagnosis.compare import recorded_rate

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]


def contents(folder: Path) -> dict[str, str]:
    """Every file's hash."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_an_experiment_is_measured_and_compared(
    tmp_path: Path, make_hf_llama: Callable[..., Path], train_tiny: Callable[..., list[dict[str, Any]]]
) -> None:
    folder = make_hf_llama()
    train_tiny(folder, "old", max_steps=4)
    train_tiny(folder, "new", max_steps=8)
    new, old = tmp_path / "new", tmp_path / "old"
    before = contents(new)
    command = [sys.executable, str(ROOT / "tools" / "diagnose_speed.py"), str(new), "--against", str(old), "--keep"]
    command += ["--output", str(tmp_path / "report"), "--probes", "threads", "--budget_s", "15"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert contents(new) == before
    report = json.loads((tmp_path / "report" / "report.json").read_text())

    speed = report["speed"]
    assert speed["tokens_per_step"] == 4 * 128
    assert speed["effective_tokens_per_second"]["value"] * speed["step_time_s"]["value"] == pytest.approx(512, rel=1e-3)
    assert speed["micro_batches_per_step"] == 4
    assert {"data", "forward", "backward", "optimizer"} <= set(report["phases"])
    # Two clocks over the same training, not over the same steps: the same unit, not the same figure.
    scratch = Path(done.stderr.rpartition("scratch folder kept: ")[2].strip())
    (metrics,) = scratch.rglob("metrics.jsonl")
    recorded = [json.loads(line)["tokens_per_second"] for line in metrics.read_text().splitlines() if "loss" in line]
    shutil.rmtree(scratch)
    assert 0.5 < speed["effective_tokens_per_second"]["value"] / statistics.median(recorded) < 2
    assert report["recorded_tokens_per_second"] == recorded_rate(new)

    against = report["against"]
    assert against["tokens"] == [8 * 512, 4 * 512]
    assert against["verdict"].startswith("2 times the tokens")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "metrics.jsonl<b>" in page and against["verdict"] in page
