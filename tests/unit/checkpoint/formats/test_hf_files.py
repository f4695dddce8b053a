"""The files of a folder that are its model, among others."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pretrainkit.checkpoint.formats.hf import locate_tensors, open_by_package
from pretrainkit.checkpoint.formats.hf_files import INDEX_NAME, weight_files, weights_fingerprint
from pretrainkit.errors import RequestError
from pretrainkit.files import same_fingerprint


@pytest.fixture(params=["one file", "shards"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "one file":
        save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    else:
        save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
        save_file({"b": torch.ones(3)}, tmp_path / "model-2.safetensors")
        weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_files_beside_the_model_change_nothing(folder: Path) -> None:
    files, fingerprint = weight_files(folder), weights_fingerprint(folder)
    save_file({"tok_embeddings.weight": torch.ones(4)}, folder / "consolidated.safetensors")
    assert weight_files(folder) == files
    assert weights_fingerprint(folder) == fingerprint
    with ExitStack() as stack:
        _, names = open_by_package(folder, stack)
    assert names == {"a", "b"} == set(locate_tensors(folder))


def test_two_models_in_a_folder_are_refused(folder: Path) -> None:
    if not (folder / INDEX_NAME).exists():
        pytest.skip("has no index")
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(RequestError, match="and an index of other files"):
        locate_tensors(folder)


def test_a_folder_without_weights_has_none(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == []


def test_the_fingerprint_has_samples_of_every_tensor(tmp_path: Path) -> None:
    """A hundred small tensors behind a large one, where samples of the file alone would miss them."""
    tensors = {f"a{number}": torch.zeros(64) for number in range(100)} | {"large": torch.zeros(2**22)}
    save_file(tensors, tmp_path / "model.safetensors")
    before = weights_fingerprint(tmp_path)
    for name in ("a0", "a57", "a99"):
        save_file({**tensors, name: torch.ones(64)}, tmp_path / "model.safetensors")
        changed = weights_fingerprint(tmp_path)
        assert not same_fingerprint(changed, before) and same_fingerprint(before, before.partition("+")[0])
