"""A run with checkpoints doesn't miss the weights that it began from; one without still needs them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_run

from pretrainkit.checkpoint.formats.hf_files import REPORT_NAME, weights_fingerprint
from pretrainkit.config.load import load_config
from pretrainkit.config.schema import ResolvedRun, ValidationSet
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.jobs.run_job import needs_of
from pretrainkit.launch.start import resolve_request
from pretrainkit.run import checkpoints, initial_weights, resume_plan
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.identity import changes_since_last_start, write_run_file

Resolve = Callable[..., ResolvedRun]
KINDS = ["nemo", "hf"]


@pytest.fixture
def resolved(tmp_path: Path, hf_folder: Path, dataset_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """The run of a request that begins from the weights named."""
    monkeypatch.chdir(tmp_path)

    def resolve(nemo_model: str, **flags: Any) -> ResolvedRun:
        request: dict[str, Any] = {
            "hf_model_id": str(hf_folder),
            "nemo_model": nemo_model,
            "data.dataset_path": str(dataset_folder),
            "data.sequence_length": 128,
            "training.global_batch_size": 8,
            "launch.accelerator": "cpu",
            "experiments_dir": "experiments",
            "experiment": "tiny",
        }
        return resolve_request(load_config(flags={**request, **flags}))

    return resolve


def make_weights(folder: Path, kind: str, hf_folder: Path) -> Path:
    if kind == "hf":
        shutil.copytree(hf_folder, folder)
        (folder / "model.safetensors").write_bytes(bytes(8) + folder.name.encode())
        return folder
    for name in ("weights", "context"):
        (folder / name).mkdir(parents=True)
    (folder / "weights" / ".metadata").write_text(folder.name)
    return folder


def save(run: ResolvedRun, *, step: int = 2, is_complete: bool = True) -> Path:
    folder = RunFolder.of(run).checkpoint(step)
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / ".metadata").write_bytes(b"optimizer.state.param.")
    if is_complete:
        checkpoints.commit(checkpoints.Checkpoint(folder, step=step, consumed_samples=8 * step, global_batch_size=8))
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_emptied", [False, True], ids=["folder gone", "files gone"])
def test_a_run_continues_when_its_first_weights_are_gone(
    resolved: Resolve, tmp_path: Path, hf_folder: Path, caplog: pytest.LogCaptureFixture, kind: str, is_emptied: bool
) -> None:
    begun_from = make_weights(tmp_path / "first", kind, hf_folder)
    before = resolved("first")
    write_run_file(before)
    saved = save(before)
    shutil.rmtree(begun_from)
    if is_emptied:
        begun_from.mkdir()
    for spelt in ("first", str(begun_from)):
        with caplog.at_level("WARNING", logger="pretrainkit"):
            run = resolved(spelt, **{"training.max_steps": 50})
        assert "the run started from it, and continues from its own checkpoint without it" in caplog.text
        assert run.initial_weights == before.initial_weights
        assert "config.nemo_model" not in changes_since_last_start(run)
        plan = resume_plan.plan_start(run)
        assert (plan.mode, plan.checkpoint) == (resume_plan.CONTINUE, str(saved))
        caplog.clear()
    write_run_file(run)
    assert resolved("first") == before, "and once more"


def test_hugging_face_weights_that_only_a_first_start_compares_are_not_missed(
    resolved: Resolve, tmp_path: Path, hf_folder: Path
) -> None:
    model, first = (
        make_weights(tmp_path / "model", "hf", hf_folder),
        make_weights(tmp_path / "first", "nemo", hf_folder),
    )
    report = {"source_fingerprint": weights_fingerprint(model)}
    (first / REPORT_NAME).write_text(json.dumps(report))
    flags = {"hf_model_id": str(model), "training.start_parity": "require"}
    run = resolved("first", **flags)
    write_run_file(run)
    (model / "model.safetensors").unlink()
    with pytest.raises(RequestError, match="--start_parity"):
        resolved("first", **flags)
    save(run)
    assert resolved("first", **flags) == run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved", ["nothing", "one without a mark", "one put aside"])
def test_without_a_complete_checkpoint_they_are_needed(
    resolved: Resolve, tmp_path: Path, hf_folder: Path, kind: str, saved: str
) -> None:
    make_weights(tmp_path / "first", kind, hf_folder)
    run = resolved("first")
    write_run_file(run)
    if saved == "one without a mark":
        save(run, is_complete=False)
    elif saved == "one put aside":
        save(run).rename(Path(run.experiment_dir) / "checkpoints" / "step_00000002.incomplete")
    shutil.rmtree(tmp_path / "first")
    with pytest.raises(RequestError, match="--nemo_model: no folder first"):
        resolved("first")


def test_damaged_checkpoints_are_no_fresh_start(resolved: Resolve, tmp_path: Path, hf_folder: Path) -> None:
    make_weights(tmp_path / "first", "nemo", hf_folder)
    run = resolved("first")
    write_run_file(run)
    (save(run) / "weights" / ".metadata").write_bytes(b"torn")
    shutil.rmtree(tmp_path / "first")
    with pytest.raises(CheckpointError, match="none of 1 checkpoints is complete"):
        resume_plan.plan_start(resolved("first"))


def test_other_weights_are_another_run_whether_the_first_are_there(
    resolved: Resolve, tmp_path: Path, hf_folder: Path
) -> None:
    make_weights(tmp_path / "first", "nemo", hf_folder)
    make_weights(tmp_path / "other", "nemo", hf_folder)
    run = resolved("first")
    write_run_file(run)
    save(run)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"config\.nemo_model was .*first, now .*other"):
            changes_since_last_start(resolved("other"))
        with pytest.raises(RequestError, match="--nemo_model: no folder nowhere"):
            resolved("nowhere")
        shutil.rmtree(tmp_path / "first", ignore_errors=True)


def test_a_relative_path_names_other_weights_in_another_folder(
    resolved: Resolve, tmp_path: Path, hf_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_weights(tmp_path / "first", "nemo", hf_folder)
    run = resolved("first")
    write_run_file(run)
    save(run)
    (tmp_path / "elsewhere" / "first").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    here = {"experiments_dir": str(tmp_path / "experiments")}
    assert resolved("first", **here).initial_weights == run.initial_weights, "no weights are here: it is a resume"
    (tmp_path / "elsewhere" / "first").rmdir()
    make_weights(tmp_path / "elsewhere" / "first", "nemo", hf_folder)
    (tmp_path / "elsewhere" / "first" / "weights" / ".metadata").write_text("others")
    with pytest.raises(RequestError, match=r"config\.nemo_model was .*/first, now .*/elsewhere/first"):
        changes_since_last_start(resolved("first", **here))


def test_a_conversion_that_was_deleted_is_not_made_again_to_continue(
    resolved: Resolve, tmp_path: Path, hf_folder: Path
) -> None:
    make_weights(tmp_path / "first", "hf", hf_folder)
    run = dataclasses.replace(resolved("first"), start_mode=resume_plan.CONTINUE)
    initial_weights.provide_for(run)  # these are no weights: a conversion would fail
    assert not (tmp_path / "experiments").exists()
    shutil.rmtree(tmp_path / "first")
    initial_weights.provide_for(run)
    with pytest.raises(RequestError, match="first"):
        initial_weights.provide_for(dataclasses.replace(run, start_mode=resume_plan.WEIGHTS))


def test_first_weights_are_mounted_until_a_checkpoint_takes_their_place(
    resolved: Resolve, tmp_path: Path, hf_folder: Path
) -> None:
    first = make_weights(tmp_path / "first", "hf", hf_folder)
    run = resolved("first")
    assert run.initial_weights and run.initial_weights.source == str(first)
    assert Path(run.initial_weights.checkpoint) in needs_of(run), "a conversion that is still to be made"
    save(run, is_complete=False)
    assert Path(run.initial_weights.checkpoint) in needs_of(run)
    save(run, step=4)
    assert Path(run.initial_weights.checkpoint) not in needs_of(run)


def test_folders_of_validation_sets_are_mounted(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    validation = ValidationSet("held out", dataclasses.replace(run.dataset, prefixes=("/elsewhere/val",)), 1)
    assert Path("/elsewhere") in needs_of(dataclasses.replace(run, validation_sets=(validation,)))
