"""Our safetensors files are those of the safetensors package, both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pretrainkit.checkpoint.formats.hf import DTYPES, described, read_header, write_safetensors
from pretrainkit.checkpoint.lazy_tensor import LazyTensor
from pretrainkit.errors import CheckpointError

TENSORS = {
    f"{dtype}": (torch.arange(15) % 7).reshape(3, 5).to(dtype)
    for dtype in DTYPES.values()
    if "float8" not in str(dtype)
} | {"é.weight": torch.randn(4, 1), "empty": torch.empty(0, 4)}


def test_files_of_the_package_are_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "f", metadata={"format": "pt"})
    read = read_header(tmp_path / "f")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name].read(), tensor)


def test_the_package_reads_ours(tmp_path: Path) -> None:
    plan = {name: described(tensor.shape, tensor.dtype) for name, tensor in TENSORS.items()}
    write_safetensors(tmp_path / "f", plan, (LazyTensor.of(tensor) for tensor in TENSORS.values()))
    read = load_file(tmp_path / "f")
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def shorten(data: bytes) -> bytes:
    return data[:-1]


def lengthen(data: bytes) -> bytes:
    return data + b"\0"


def shift(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for info in header.values():
        if "data_offsets" in info:
            info["data_offsets"] = [offset + 8 for offset in info["data_offsets"]]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :] + b"\0" * 8


@pytest.mark.parametrize("damage", [shorten, lengthen, shift, lambda data: data[:5], lambda data: b"\xff" * 20])
def test_damage_is_noticed(tmp_path: Path, damage: object) -> None:
    save_file({"a": torch.randn(3, 5), "b": torch.randn(7)}, tmp_path / "f", metadata={"format": "pt"})
    (tmp_path / "f").write_bytes(damage((tmp_path / "f").read_bytes()))  # type: ignore[operator]
    with pytest.raises(CheckpointError):
        read_header(tmp_path / "f")
