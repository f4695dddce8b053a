"""A run that stops and goes on is the run that never stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.formats.torch_dist import read_metadata
from pretrainkit.config.run_file import read_run, write_run
from pretrainkit.errors import CheckpointError
from pretrainkit.files import write_json
from pretrainkit.run import checkpoints as resume
from pretrainkit.run.folder import COMMIT_MARK
from pretrainkit.run.json_lines import read_records
from pretrainkit.run.retention import remove

pytestmark = pytest.mark.integration
inspect_run = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "inspect_run.py"))["main"]


def by_step(records: list[dict[str, Any]]) -> dict[int, tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of each step; of a step done twice, the later one."""
    return {r["step"]: (r["loss"], r["grad_norm"], r["learning_rate"]) for r in records if "loss" in r}


@pytest.fixture(scope="module")
def tiny(make_hf_llama: Callable[..., Path]) -> Path:
    return make_hf_llama()


@pytest.fixture(scope="module")
def unbroken(
    tiny: Path, train_tiny_in: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[float, float, float]]:
    """Eight steps in one go."""
    return by_step(train_tiny_in(tmp_path_factory.mktemp("runs"), tiny, "unbroken", max_steps=8))


@pytest.fixture(scope="module")
def four_steps(tiny: Path, train_tiny_in: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of experiments with a run of four steps, `stopped` once while the learning rate rose, and then."""
    home = tmp_path_factory.mktemp("runs")
    train_tiny_in(home, tiny, "stopped", max_steps=1)
    assert read_run(home / "stopped" / "run.json").start_mode == "random"
    train_tiny_in(home, tiny, "stopped", max_steps=4)
    return home


@pytest.fixture
def stopped(four_steps: Path, tmp_path: Path) -> None:
    """A copy of that run as this test's experiment `stopped`."""
    shutil.copytree(four_steps, tmp_path, dirs_exist_ok=True)


@pytest.mark.usefixtures("stopped")
def test_resumed_losses_equal_unbroken_ones(
    tiny: Path, tmp_path: Path, unbroken: dict[int, Any], train_tiny: Callable[..., Any]
) -> None:
    resumed = train_tiny(tiny, "stopped", max_steps=8)
    assert read_run(tmp_path / "stopped" / "run.json").start_mode == "continue"
    starts = [(record["mode"], record["step"]) for record in resumed if record.get("event") == "start"]
    assert starts == [("random", 0), ("continue", 1), ("continue", 4)]
    assert by_step(resumed) == unbroken
    assert sorted(unbroken) == list(range(1, 9))


@pytest.fixture
def train_with(write_tiny_run: Callable[..., Path]) -> Callable[..., list[dict[str, Any]]]:
    """Train a tiny model with other settings of the optimizer, which stand in a dict."""

    def train(*arguments: Any, optimizer: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
        run_file = write_tiny_run(*arguments, **settings)
        run = read_run(run_file)
        changed = dataclasses.replace(run.config.optimizer, **optimizer)
        write_run(run_file, dataclasses.replace(run, config=dataclasses.replace(run.config, optimizer=changed)))
        ranks.run_ranks(ranks.train_rank, run.world_size, run_file.parent, run_file=run_file)
        return read_records(run_file.parent / "metrics.jsonl")

    return train


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("changed", [{"adam_beta1": 0.1}, {"adam_beta2": 0.5}, {"adam_eps": 1e-2}], ids=str)
def test_changed_settings_of_adam_take_effect(
    tiny: Path, unbroken: dict[int, Any], train_with: Callable[..., Any], changed: dict[str, float]
) -> None:
    resumed = by_step(train_with(tiny, "stopped", max_steps=8, optimizer=changed))
    assert resumed[5] == unbroken[5]  # its loss and norm are those before the first update
    assert abs(resumed[6][0] - unbroken[6][0]) > 1e-4


def test_another_kind_of_optimizer_goes_on_with_new_moments(tiny: Path, train_with: Callable[..., Any]) -> None:
    train_with(tiny, "kind", max_steps=2, save_interval=2, optimizer={"distributed": True})
    settings = {"max_steps": 4, "save_interval": 4, "optimizer": {"distributed": False}}
    with pytest.raises(AssertionError, match=r"optimizer\.distributed(.|\n)*--reset_optimizer"):
        train_with(tiny, "kind", **settings)
    train_with(tiny, "kind", **settings, reset_optimizer=True)
    records = train_with(tiny, "kind", **{**settings, "max_steps": 5})
    starts = [record["optimizer_state"] for record in records if record.get("event") == "start"]
    assert starts == ["zero", "reset", "restored"]


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2}, {"data_parallel": 2}, {"context": 2}],
    ids=lambda layout: " ".join(layout),
)
def test_optimizer_state_moves_to_another_layout(
    tiny: Path, unbroken: dict[int, Any], train_tiny: Callable[..., Any], layout: dict[str, Any]
) -> None:
    resumed = by_step(train_tiny(tiny, "stopped", max_steps=8, **layout))
    for step, expected in unbroken.items():
        assert resumed[step] == pytest.approx(expected, abs=1e-6)


def test_a_changed_batch_goes_on_from_the_same_sample(tiny: Path, train_tiny: Callable[..., Any]) -> None:
    train_tiny(tiny, "changed", max_steps=2, save_interval=2)
    train_tiny(tiny, "changed", max_steps=4, save_interval=2, global_batch_size=8, allow_batch_change=True)
    records = train_tiny(tiny, "changed", max_steps=6, save_interval=2, global_batch_size=8, data_parallel=2)
    starts = [record for record in records if record.get("event") == "start"]
    assert [(start["step"], start["consumed_samples"]) for start in starts] == [(0, 0), (2, 8), (4, 24)]
    # NeMo counts on a run of one batch size: 18 samples, of which 40 are used already.
    records = train_tiny(tiny, "changed", max_steps=9, save_interval=9, global_batch_size=2, allow_batch_change=True)
    used = {record["step"]: record["tokens"] // 128 for record in records if "tokens" in record}
    assert [used[step] for step in range(1, 10)] == [4, 8, 16, 24, 32, 40, 42, 44, 46]


def test_a_checkpoint_without_optimizer_state_is_continued_with_new_moments(
    tiny: Path, tmp_path: Path, train_tiny: Callable[..., Any]
) -> None:
    settings = {"save_interval": 1, "keep_optimizer_last": 2}
    reference = by_step(train_tiny(tiny, "small", max_steps=4, **settings))
    checkpoints = tmp_path / "small" / "checkpoints"
    saved = resume.all_complete(checkpoints)
    assert [(each.step, resume.optimizer_layout(each) is not None) for each in saved] == [
        (1, False),
        (2, False),
        (3, True),
        (4, True),
    ]
    assert saved[0].num_bytes < saved[-1].num_bytes / 2
    convert(saved[0].path, tmp_path / "hf")  # it can be released
    assert (tmp_path / "hf" / "model.safetensors").exists()
    for old in saved[2:]:
        remove(old)
    with pytest.raises(AssertionError, match="it has no optimizer state"):
        train_tiny(tiny, "small", max_steps=4, **settings)
    again = by_step(train_tiny(tiny, "small", max_steps=4, reset_optimizer=True, **settings))
    assert again[3][0] == pytest.approx(reference[3][0], rel=1e-6)  # the weights are those of step 2
    assert again[4][0] != reference[4][0]


def test_reset_moments_leave_weights_and_data_as_they_were(tiny: Path, train_tiny: Callable[..., Any]) -> None:
    precision = "bf16"  # its fp32 copies of the weights must be made anew
    unbroken = by_step(train_tiny(tiny, "unbroken", max_steps=8, precision=precision))
    train_tiny(tiny, "reset", max_steps=4, precision=precision)
    reset = by_step(train_tiny(tiny, "reset", max_steps=8, precision=precision, reset_optimizer=True))
    assert reset[5] == pytest.approx(unbroken[5], rel=1e-6)  # the first loss, norm and rate know nothing of moments
    assert reset[6][0] != unbroken[6][0]
    assert reset[8][0] == pytest.approx(unbroken[8][0], rel=0.05)


def test_a_damaged_checkpoint_of_the_right_size_is_passed_over(
    tiny: Path, tmp_path: Path, train_tiny: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"save_interval": 2, "data_parallel": 2}
    unbroken = by_step(train_tiny(tiny, "damaged", max_steps=4, **settings))
    older, newest = resume.all_complete(tmp_path / "damaged" / "checkpoints")
    chunk = read_metadata(newest.path / "weights")["module.embedding.word_embeddings.weight"].chunks[0]
    with chunk.path.open("r+b") as file:
        file.seek(chunk.offset + chunk.num_bytes // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x40]))
    with pytest.raises(CheckpointError, match=r"word_embeddings\.weight: weights/__\d_\d\.distcp: bytes \d+ to \d+"):
        convert(newest.path, tmp_path / "hf")
    assert inspect_run([str(tmp_path / "damaged"), "--no-plot", "--verify"]) == 1
    assert f"damaged    {newest.path.name}: weights/{chunk.path.name}" in capfd.readouterr().out
    # Marks of older versions have no checksums.
    mark = json.loads((older.path / COMMIT_MARK).read_text())
    write_json(older.path / COMMIT_MARK, {name: value for name, value in mark.items() if name != "checksums"})
    records = train_tiny(tiny, "damaged", max_steps=4, **settings)
    starts = [record for record in records if record.get("event") == "start"]
    assert [start["step"] for start in starts] == [0, 2] and list(starts[1]["damaged"]) == [newest.path.name]
    assert by_step(records) == unbroken
    assert "skipping a damaged checkpoint" in (tmp_path / "damaged" / "rank0.log").read_text()
    assert (newest.path.with_name(f"{newest.path.name}.incomplete") / COMMIT_MARK).exists()
    assert resume.problem_of(resume.read(newest.path)) == "", "saved again"
