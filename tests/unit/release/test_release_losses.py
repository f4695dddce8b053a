"""The release report has the held-out losses of the run, before and after."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrainkit.release.held_out import held_out_of
from pretrainkit.release.report import Check, ReleaseReport


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Of step 20 of an experiment that went on."""
    records = [{"event": "start", "step": 0}, {"step": 0, "val_loss": 9.0}, {"event": "start", "step": 0}]
    for step in (0, 20, 40):
        by_label = {"ja": 5 - step / 20, "e|n": 4 - step / 20}
        bits = {"ja": 2.5 - step / 40}
        losses = {"val_loss": 4.5 - step / 20, "val_loss_by_label": by_label, "val_bits_per_byte_by_label": bits}
        records += [{"step": step, **losses}, {"step": step + 1, "loss": 9.0, "learning_rate": 0.1}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    folder = tmp_path / "checkpoints" / "step_00000020" / "weights"
    folder.mkdir(parents=True)
    return folder.parent


@pytest.mark.parametrize("inside", [".", "weights"])
def test_losses_up_to_the_released_step_are_reported(checkpoint: Path, inside: str) -> None:
    found = held_out_of(checkpoint / inside)
    assert (found["first"]["step"], found["last"]["step"], found["last"]["val_loss"]) == (0, 20, 3.5)
    report = ReleaseReport("source", "released", [Check("config.json", True, "as the source's")], held_out=found)
    assert report.as_dict()["held_out"] == found
    lines = report.as_markdown().splitlines()
    begin = lines.index("| held-out loss | step 0 | step 20 | bits per byte |")
    assert lines[begin + 2 :] == [
        "| all | 4.5000 | 3.5000 |  |",
        "| label ja | 5.0000 | 4.0000 | 2.0000 |",
        "| label e\\|n | 4.0000 | 3.0000 |  |",
        "",
        "| file | SHA-256 |",
        "|---|---|",
    ]


def test_a_checkpoint_without_records_has_none(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").unlink()
    assert held_out_of(checkpoint) == {} == held_out_of(tmp_path)
