"""An experiment is diagnosed by its own code, stays as it is, and the numbers are those of metrics.jsonl."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    command = [sys.executable, str(ROOT / "tools" / "diagnose_speed.py"), str(new), "--against", str(old), "--quick"]
    command += ["--output", str(tmp_path / "report"), "--probes", "threads", "--budget_s", "15"]
    command += ["--time_checkpoint"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert contents(new) == before
    report = json.loads((tmp_path / "report" / "report.json").read_text())

    agreed, speed = report["metrics_jsonl"], report["speed"]
    assert agreed["windows"] >= 4
    # Both are clocks over the same steps, whose borders lie at different places: the same unit, not the same figure.
    assert 0.5 < agreed["recorded_step_time_s"] / speed["step_time_s"]["value"] < 2
    assert speed["tokens_per_step"] == 4 * 128
    assert speed["effective_tokens_per_second"]["value"] * speed["step_time_s"]["value"] == pytest.approx(512, rel=1e-3)
    assert speed["micro_batches_per_step"] == 4
    assert {"data", "forward", "backward", "optimizer"} <= set(report["phases"])

    saving = report["checkpoint"]
    assert 0 < saving["seconds"] < 60
    assert saving["save_interval"] > 0 and 0 < saving["share"] < 1
    told = [cause for cause in report["causes"] if cause["name"] == "save_interval"]
    assert bool(told) == (saving["share"] >= 0.02)

    against = report["against"]
    assert against["tokens"] == {"this": 8 * 512, "other": 4 * 512, "ratio": 2}
    assert against["verdict"].startswith("2 times the tokens")
    assert {check["what"] for check in report["checks"]} >= {"padding token", "amount of data", "file system"}
    page = (tmp_path / "report" / "report.html").read_text()
    assert "metrics.jsonl<b>" in page
