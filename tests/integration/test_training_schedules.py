"""Schedules through the command: what --plan says, what the steps have, and a run that is made longer."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration
pretrain = runpy.run_path(str(Path(__file__).parents[2] / "pretraining" / "pretrain.py"))["main"]


@pytest.fixture(scope="module")
def words(make_hf_llama: Callable[..., Path], dataset_prefix: Path) -> Callable[..., list[str]]:
    """The command line of a tiny run; more flags follow."""
    model = make_hf_llama()

    def flags(home: Path, experiment: str, max_steps: int, *more: object) -> list[str]:
        given = ["--hf_model_id", model, "--dataset_path", dataset_prefix, "--sequence_length", 128, "--split", "8,1,1"]
        given += ["--accelerator", "cpu", "--num_gpus", 1, "--global_batch_size", 4, "--lr", 1e-3, "--num_workers", 0]
        given += ["--val_interval", 0, "--experiments_dir", home, "--experiment", experiment, "--max_steps", max_steps]
        return [*map(str, given + list(more))]

    return flags


def rates(records: list[dict[str, Any]]) -> list[float]:
    """The learning rate of each step; of a step done twice, the later one."""
    by_step = {record["step"]: record["learning_rate"] for record in records if "loss" in record}
    return [by_step[step] for step in sorted(by_step)]


def test_a_wsd_run_grows_decays_and_warms_up_again(
    words: Callable[..., list[str]],
    tmp_path: Path,
    train_request: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    wsd = ["--lr_schedule", "wsd", "--lr_cooldown", 2, "--lr_warmup_steps", 1, "--lr_cooldown_style", "linear"]
    train_request(words(tmp_path, "wsd", 3, *wsd, "--lr_decay_steps", 5))
    caplog.clear()
    records = train_request(words(tmp_path, "wsd", 6, *wsd))
    assert "To keep the schedule" not in caplog.text, "still in the stable phase"
    low, high = 1e-4, 1e-3
    assert rates(records) == pytest.approx([high / 2, high, high, high, high, (low + high) / 2])

    again = words(tmp_path, "wsd", 9, *wsd, "--lr_rewarm_step", 6)
    capsys.readouterr()
    assert pretrain([*again, "--plan"]) == 0
    plan = capsys.readouterr().out
    assert "next lr    0.00055" in plan
    assert "lr 0.001 -> 0.0001 wsd again from step 6, warm-up 1, linear decay from step 7 to 9" in plan
    assert pretrain([*again, "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] in plan
    assert rates(train_request(again))[6:] == pytest.approx([(low + high) / 2, high, (low + high) / 2])
