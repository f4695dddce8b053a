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
