"""Where the model and its first weights come from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pretrainkit.checkpoint.formats.hf_files import HF_SOURCE, REPORT_NAME, weights_fingerprint
from pretrainkit.config.schema import RunConfig
from pretrainkit.data import hub
from pretrainkit.errors import RequestError
from pretrainkit.models.registry import read_shape
from pretrainkit.run import initial_weights
from pretrainkit.run.folder import COMMIT_MARK


def test_a_folder_is_taken_as_it_is(hf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.local_folder(str(hf_folder)) == hf_folder.resolve()
    monkeypatch.chdir(hf_folder.parent)
    assert hub.local_folder("./tiny") == hf_folder.resolve()
    monkeypatch.setenv("HOME", str(hf_folder.parent))
    assert hub.local_folder("~/tiny") == hf_folder.resolve()


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./tiny", "~/tiny", "a/b/c", "a b", "owner/"])
def test_what_can_be_no_id_is_not_looked_up(name: str) -> None:
    with pytest.raises(RequestError, match="no folder"):
        hub.local_folder(name)


def test_offline_and_not_in_the_cache_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import close_session, constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RequestError, match="HF_HUB_OFFLINE is set") as error:
        hub.local_folder("someone/something")
    close_session()  # drops the client that was made for being offline
    assert "scripts/prefetch.sh --dir FOLDER --model someone/something" in str(error.value)


def with_weights(hf_folder: Path, folder: Path) -> Path:
    shutil.copytree(hf_folder, folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_hugging_face_folder_has_one_conversion_until_it_changes(hf_folder: Path, tmp_path: Path) -> None:
    folder = with_weights(hf_folder, tmp_path / "model")
    first = initial_weights.locate(str(folder), tmp_path / "experiments")
    assert first.needs_conversion and Path(first.checkpoint).parent == tmp_path / "experiments" / ".converted"
    assert initial_weights.locate(str(folder), tmp_path / "experiments") == first
    (folder / "model.safetensors").write_bytes(b"changed weights")
    assert initial_weights.locate(str(folder), tmp_path / "experiments") != first


def test_a_nemo_checkpoint_is_used_in_place(hf_folder: Path, tmp_path: Path) -> None:
    for name in ("weights", "context"):
        (tmp_path / name).mkdir()
    shutil.copytree(hf_folder, tmp_path / HF_SOURCE)
    initial = initial_weights.locate(str(tmp_path), tmp_path / "experiments")
    assert initial.checkpoint == str(tmp_path) and not initial.needs_conversion
    initial_weights.check_shape(initial, read_shape(hf_folder), RunConfig())


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_anything_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestError, match="--nemo_model"):
        initial_weights.locate(str(tmp_path / name), tmp_path)


@pytest.mark.parametrize("named", ["run", "run/checkpoints"])
def test_of_a_run_the_checkpoint_to_name_is_told(tmp_path: Path, named: str) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    for name in ("step_00000002", "step_00000010", "step_00000012.incomplete", "step_00000014"):
        (checkpoints / name).mkdir(parents=True)
    for name in ("step_00000002", "step_00000010", "step_00000012.incomplete"):
        (checkpoints / name / COMMIT_MARK).write_text("{}")
    with pytest.raises(RequestError, match=rf"the newest is {checkpoints}/step_00000010$"):
        initial_weights.locate(str(tmp_path / named), tmp_path)


def test_weights_of_another_shape_are_refused(hf_folder: Path, tmp_path: Path) -> None:
    folder = with_weights(hf_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(RequestError, match="num_layers 3 and not 2"):
        initial_weights.check_shape(initial_weights.locate(str(folder), tmp_path), read_shape(hf_folder), RunConfig())


def test_a_converted_checkpoint_knows_the_weights_it_was_made_from(hf_folder: Path, tmp_path: Path) -> None:
    folder = with_weights(hf_folder, tmp_path / "model")
    located = initial_weights.locate(str(folder), tmp_path, hf_folder=hf_folder)
    assert (located.hf_weights, located.fingerprint) == (str(folder), weights_fingerprint(folder))
    checkpoint = tmp_path / "checkpoint"
    for name in ("weights", "context"):
        (checkpoint / name).mkdir(parents=True)

    def hf_weights(named: Path) -> str | None:
        return initial_weights.locate(str(checkpoint), tmp_path, hf_folder=named).hf_weights

    assert hf_weights(folder) is None, "it may have been trained"
    report = {"source_fingerprint": weights_fingerprint(folder)}
    (checkpoint / REPORT_NAME).write_text(json.dumps(report))
    assert hf_weights(folder) == str(folder)
    assert initial_weights.locate(str(checkpoint), tmp_path).fingerprint == located.fingerprint
    assert hf_weights(hf_folder) is None, "it has no weights"
    (folder / "model.safetensors").write_bytes(b"changed")
    assert hf_weights(folder) is None, "it has others"


def test_weights_of_which_files_are_missing_are_those_of_no_checkpoint(hf_folder: Path, tmp_path: Path) -> None:
    folder = with_weights(hf_folder, tmp_path / "model")
    index = {"weight_map": {"a": "model.safetensors", "b": "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = tmp_path / "checkpoint"
    for name in ("weights", "context"):
        (checkpoint / name).mkdir(parents=True)
    (checkpoint / REPORT_NAME).write_text(json.dumps({"source_fingerprint": "f"}))
    assert initial_weights.of_checkpoint(checkpoint, folder).hf_weights is None
    assert initial_weights.locate(str(folder), tmp_path).fingerprint is None
