"""Schedules and branches through the command: what --plan says, what the steps have, what is refused."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
pretrain = runpy.run_path(str(REPOSITORY / "pretraining" / "pretrain.py"))["main"]
inspect_run = runpy.run_path(str(REPOSITORY / "tools" / "inspect_run.py"))["main"]
WSD = ["--lr_schedule", "wsd", "--lr_cooldown", 2, "--lr_warmup_steps", 1, "--lr_cooldown_style", "linear"]


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
) -> None:
    train_request(words(tmp_path, "wsd", 3, *WSD, "--lr_decay_steps", 5))
    records = train_request(words(tmp_path, "wsd", 6, *WSD))
    assert "To keep the schedule" not in capsys.readouterr().err, "still in the stable phase"
    low, high = 1e-4, 1e-3
    assert rates(records) == pytest.approx([high / 2, high, high, high, high, (low + high) / 2])

    again = words(tmp_path, "wsd", 9, *WSD, "--lr_rewarm_step", 6)
    capsys.readouterr()
    assert pretrain([*again, "--plan"]) == 0
    plan = capsys.readouterr().out
    assert "next lr    0.00055" in plan
    assert "lr 0.001 -> 0.0001 wsd again from step 6, warm-up 1, linear decay from step 7 to 9" in plan
    assert pretrain([*again, "--plan", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] in plan
    assert rates(train_request(again))[6:] == pytest.approx([(low + high) / 2, high, (low + high) / 2])


def losses(records: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records if "loss" in record}


@pytest.fixture(scope="module")
def stable(
    words: Callable[..., list[str]], train_request: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, tuple[float, float]]]:
    """A folder with the experiment `stable`, of 8 steps with a checkpoint of every second, and its losses."""
    home = tmp_path_factory.mktemp("runs")
    records = train_request(words(home, "stable", 8, *WSD, "--lr_decay_steps", 50, "--save_interval", 2))
    return home, losses(records)


def test_a_branch_that_changes_nothing_has_the_losses_of_its_parent(
    words: Callable[..., list[str]],
    stable: tuple[Path, dict[int, tuple[float, float]]],
    train_request: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    home, expected = stable
    command = words(home, "same", 8, *WSD, "--lr_decay_steps", 50, "--save_interval", 2, "--branch_from", "stable:4")
    assert pretrain([*command, "--plan"]) == 0
    plan = capsys.readouterr().out
    assert f"branching from {home / 'stable'}:4" in plan and "changed    -" in plan and "16 samples used" in plan
    assert not (home / "same").exists()
    records = train_request(command)
    assert losses(records) == {step: values for step, values in expected.items() if step > 4}

    point = {"experiment": str(home / "stable"), "step": 4}
    assert json.loads((home / "same" / "run.json").read_text())["branch"] == point
    start = json.loads((home / "same" / "attempts.jsonl").read_text().splitlines()[0])
    assert (start["event"], start["branch"]) == ("start", f"{home / 'stable'}:4")
    capsys.readouterr()
    assert inspect_run([str(home / "same")]) == 0
    assert f"branch     of {home / 'stable'} at step 4" in capsys.readouterr().out
    ours, theirs = (home / name / "checkpoints" / "step_00000004" for name in ("same", "stable"))
    files = [path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()]
    assert len(files) > 4 and all((ours / name).samefile(theirs / name) for name in files)


def test_a_decay_branch_goes_on_without_its_parent(
    words: Callable[..., list[str]],
    stable: tuple[Path, dict[int, tuple[float, float]]],
    train_request: Callable[..., Any],
    tmp_path: Path,
) -> None:
    shutil.copytree(stable[0] / "stable", tmp_path / "stable")
    command = words(tmp_path, "decay", 8, *WSD, "--branch_from", tmp_path / "stable")  # its newest: step 8
    assert pretrain([*command, "--plan"]) == 0, "8 of 8 are done"
    command = words(tmp_path, "decay", 8, *WSD, "--save_interval", 1, "--branch_from", "stable:6")
    records = train_request([*command, "--max_steps", "7", "--lr_decay_steps", "8"])
    assert rates(records) == [1e-3]
    shutil.rmtree(tmp_path / "stable")
    records = train_request(command)
    assert rates(records) == pytest.approx([1e-3, 5.5e-4])
    starts = [record for record in records if record.get("event") == "start"]
    assert [start["branch"] is None for start in starts] == [False, True]


def test_what_a_branch_may_not_change_is_refused(
    words: Callable[..., list[str]],
    stable: tuple[Path, dict[int, tuple[float, float]]],
    make_hf_llama: Callable[..., Path],
    dataset_prefix: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home, _ = stable

    def refused(branch_from: object, *more: object, experiment: str = "refused") -> str:
        assert pretrain([*words(home, experiment, 9, "--branch_from", branch_from, *more), "--plan"]) == 2
        return capsys.readouterr().err

    message = refused("stable:3")
    assert "no complete checkpoint of step 3" in message and "one of its steps 2, 4, 6, 8" in message
    assert "is not an experiment" in refused("unstable")
    assert "this experiment has checkpoints and is no branch" in refused("stable:4", experiment="stable")
    message = "the branch would be another run than its parent: config.training.seed was 1234, now 7"
    assert message in refused("stable:4", "--seed", 7)
    assert "with 4 samples a step, now 8" in refused("stable:4", "--global_batch_size", 8)
    assert "model.num_layers" in refused("stable:4", "--hf_model_id", make_hf_llama(num_hidden_layers=1))
    tokenizer = tmp_path / "model"
    shutil.copytree(words(home, "x", 1)[1], tokenizer)
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    content["added_tokens"] = [*content["added_tokens"]][::-1]
    (tokenizer / "tokenizer.json").write_text(json.dumps(content, indent=1))
    for path in map(Path, (f"{dataset_prefix}.bin", f"{dataset_prefix}.idx")):  # without the manifest, which names it
        shutil.copy(path, tmp_path / path.name)
    unknown = ["--dataset_path", tmp_path / dataset_prefix.name, "--allow_data_change"]
    assert "another tokenizer than that of" in refused("stable:4", "--hf_model_id", tokenizer, *unknown)
    assert pretrain([*words(home, "stable", 9, *WSD, "--hf_model_id", tokenizer, *unknown), "--plan"]) == 2  # no branch
    assert "another tokenizer than that of" in capsys.readouterr().err
    assert "--allow_data_change continues with the new data" in refused("stable:4", *unknown[:2])


def test_a_batch_size_warmup_counts_samples_exactly_across_a_resume(
    words: Callable[..., list[str]],
    tmp_path: Path,
    train_request: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    warmup = ["--global_batch_size", 8, "--rampup_batch_size", "2 2 12", "--lr_warmup_steps", 1]
    warmup += ["--lr_decay_steps", 9, "--val_interval", 2, "--val_steps", 1]
    whole = train_request(words(tmp_path, "whole", 6, *warmup))
    used = {record["step"]: record["tokens"] // 128 for record in whole if "tokens" in record}
    assert [used[step] for step in range(1, 7)] == [2, 4, 8, 14, 22, 30]
    train_request(words(tmp_path, "resumed", 3, *warmup))
    resumed = train_request(words(tmp_path, "resumed", 6, *warmup))
    assert losses(resumed) == losses(whole)
    assert [each["tokens"] // 128 for each in resumed if "tokens" in each] == list(used.values())
    assert [each["val_loss"] for each in whole if "val_loss" in each][-2:] == [
        each["val_loss"] for each in resumed if "val_loss" in each
    ][-2:]
    train_request(words(tmp_path, "cut", 2, *warmup))
    assert pretrain([*words(tmp_path, "cut", 6, *warmup, "--rampup_batch_size", "2 2 24"), "--plan"]) == 2
    assert "another batch size warm-up: 2 2 12 before, now 2 2 24" in capsys.readouterr().err
