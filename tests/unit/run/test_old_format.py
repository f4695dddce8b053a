"""An experiment that was started by the version before run.json's format 3 and attempts.jsonl continues.

tests/data/run_format_2 was written by that version: two attempts, of which the second did 3 steps after a checkpoint of
step 4, from a NeMo checkpoint that was converted from a Hugging Face folder. /runs stands for a temporary folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrainkit import files
from pretrainkit.checkpoint.formats.hf_files import REPORT_NAME, weights_fingerprint
from pretrainkit.config.load import load_config
from pretrainkit.config.run_file import read_run
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import RequestError
from pretrainkit.launch.start import resolve_request
from pretrainkit.run.attempts import last_saved_step, read_attempts, restarts_without_progress
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.history import read_history
from pretrainkit.run.identity import changes_since_last_start, write_run_file
from pretrainkit.run.resume_plan import CONTINUE, plan_start

Resolve = Callable[..., ResolvedRun]
OLD = Path(__file__).parents[2] / "data" / "run_format_2"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    shutil.copytree(OLD, tmp_path / "experiments" / "old")
    for path in (tmp_path / "experiments" / "old").glob("*.json*"):
        path.write_text(path.read_text().replace("/runs", str(tmp_path)))
    return RunFolder(tmp_path / "experiments" / "old")


@pytest.fixture
def resolved(tmp_path: Path, hf_folder: Path, dataset_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """The run that the same command gives now."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "models" / "tiny"
    shutil.copytree(hf_folder, model)
    (model / "model.safetensors").write_bytes(bytes(8) + b"weights")
    data = shutil.copytree(dataset_folder, tmp_path / "data" / "prepared")

    def resolve(nemo_model: str = "first") -> ResolvedRun:
        flags: dict[str, Any] = {
            "hf_model_id": str(model),
            "nemo_model": nemo_model,
            "data.dataset_path": str(data),
            "data.sequence_length": 128,
            "training.global_batch_size": 8,
            "launch.accelerator": "cpu",
            "launch.num_gpus": 1,
            "experiments_dir": "experiments",
            "experiment": "old",
        }
        return resolve_request(load_config(flags=flags))

    return resolve


def convert(folder: Path, source: str) -> None:
    for name in ("weights", "context"):
        (folder / name).mkdir(parents=True)
    (folder / REPORT_NAME).write_text(json.dumps({"target": folder.name, "source_fingerprint": source}))


def test_its_run_json_is_read_with_the_initial_weights(folder: RunFolder, tmp_path: Path) -> None:
    weights = read_run(folder.run_file).initial_weights
    assert weights and weights.source == weights.checkpoint == str(tmp_path / "first")
    assert weights.fingerprint == (OLD / "initial_weights.txt").read_text().strip()
    assert weights.hf_weights == str(tmp_path / "models" / "tiny")


def test_initial_weights_that_were_converted_by_the_start_have_their_source(folder: RunFolder, tmp_path: Path) -> None:
    run = files.read_json(folder.run_file)
    converted = str(tmp_path / "experiments" / ".converted" / "tiny-0123")
    files.write_json(folder.run_file, run | {"initial_checkpoint": converted})
    weights = read_run(folder.run_file).initial_weights
    assert weights and (weights.source, weights.checkpoint) == (str(tmp_path / "models" / "tiny"), converted)
    files.write_json(folder.run_file, run | {"initial_checkpoint": None, "hf_weights": None})
    assert read_run(folder.run_file).initial_weights is None


@pytest.mark.parametrize("place", ["missing", "same", "moved"])
def test_it_continues(folder: RunFolder, resolved: Resolve, tmp_path: Path, place: str) -> None:
    name = "moved" if place == "moved" else "first"
    if place != "missing":
        convert(tmp_path / name, weights_fingerprint(tmp_path / "models" / "tiny"))
    run = resolved(name)
    assert changes_since_last_start(run) == {"config.training.log_interval": (1, None)}  # its default has changed
    plan = plan_start(run)
    assert (plan.mode, plan.step, plan.consumed_samples, plan.optimizer_state) == (CONTINUE, 4, 32, "restored")
    write_run_file(run)
    assert read_run(folder.run_file) == run and changes_since_last_start(run) == {}


def test_it_is_refused_with_other_weights(folder: RunFolder, resolved: Resolve, tmp_path: Path) -> None:
    convert(tmp_path / "other", "of another model")
    with pytest.raises(RequestError, match=r"config\.nemo_model was .*/first, now .*/other(.|\n)*revert the change"):
        changes_since_last_start(resolved("other"))


def test_its_attempts_and_history_are_read(folder: RunFolder) -> None:
    attempts = read_attempts(folder)
    assert [(each.start_step, each.last_step, each.mode) for each in attempts] == [(0, 5, "weights"), (4, 7, CONTINUE)]
    assert last_saved_step(folder) == 4 and restarts_without_progress(attempts) == 0
    summary = read_history(folder.path).summary
    assert (summary["steps_done"], summary["replayed_steps"], summary["restarts"]) == (7, 1, 1)
    assert summary["newest_checkpoint"] == str(folder.checkpoint(4))
