"""Reading files of torch.save without loading or running what is in them, and writing what goes around a tensor."""

from __future__ import annotations

import argparse
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrainkit.checkpoint.formats.torch_save import OpaqueObject, StoredTensor, frame, read_torch_save
from pretrainkit.checkpoint.lazy_tensor import SLICE_BYTES, LazyTensor
from pretrainkit.errors import CheckpointError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("at", [0, 1003])
def test_tensors_are_what_torch_saved(tmp_path: Path, dtype: torch.dtype, at: int) -> None:
    whole = (torch.randn(6, 10) * 100).to(dtype)
    values = {
        "whole": whole,
        "rows": whole[2:4],
        "columns": whole[:, 3:7],
        "transposed": whole.T,
        "scalar": whole[0, 0],
    }
    stream = io.BytesIO()
    torch.save({"model": values, "empty": torch.empty(0, 3)}, stream)
    path = tmp_path / "file.pt"
    path.write_bytes(b"x" * at + stream.getvalue() + b"after")
    read = read_torch_save(path, at, len(stream.getvalue()))
    assert read["empty"].read().shape == (0, 3)
    for name, value in values.items():
        assert isinstance(read["model"][name], StoredTensor)
        assert torch.equal(read["model"][name].read(), value), name


class Evil:
    """Unpickles by running a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save({"evil": Evil(mark), "args": argparse.Namespace(hidden_size=3), "weight": torch.ones(2)}, tmp_path / "f")
    read = read_torch_save(tmp_path / "f")
    assert not mark.exists()
    assert isinstance(read["evil"], OpaqueObject)
    assert read["args"].hidden_size == 3
    assert torch.equal(read["weight"].read(), torch.ones(2))


class Member:
    """Pickled as a member of an enum is by some releases of Python 3.11."""

    here: Member

    def __reduce__(self) -> Any:
        return getattr, (Member, "here")


Member.here = Member()


class Bad:
    """Unpickles to an attribute of a class that is constructed."""

    def __reduce__(self) -> Any:
        return getattr, (argparse.Namespace, "__init__")


def test_objects_of_python_itself(tmp_path: Path) -> None:
    torch.save({"member": Member.here, "set": {1, 2}, "slice": slice(3), "bad": Bad()}, tmp_path / "f")
    read = read_torch_save(tmp_path / "f")
    assert (type(read["member"]).__name__, read["set"], read["slice"]) == ("Member", {1, 2}, slice(3))
    assert isinstance(read["member"], OpaqueObject) and isinstance(read["bad"], OpaqueObject)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
def test_cut_file_is_refused(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "f"
    torch.save({"weight": torch.ones(5000)}, path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(CheckpointError, match="cut or damaged"):
        read_torch_save(path)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (1, 64, 7), (2, 1, 100, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frame_makes_a_file_that_torch_loads(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(shape).to(dtype)
    head, tail = frame(shape, dtype)
    data = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    file = head + data + tail
    assert torch.equal(torch.load(io.BytesIO(file), weights_only=True), tensor)
    saved = io.BytesIO()
    torch.save(tensor, saved)
    assert len(file) == len(saved.getvalue())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_written_as_they_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """Blocks in files and in memory, transposed, cast, and larger than what is treated at a time."""
    large = torch.randn(SLICE_BYTES // 4000 + 7, 1001)
    torch.save({"large": large, "columns": large[:50, 3:1004]}, tmp_path / "f")
    stored = read_torch_save(tmp_path / "f")["large"]
    rows = LazyTensor.of(stored, torch.randn(1001, 20).T, stored).to(dtype).rows(5, 2 * len(large))
    expected = LazyTensor.of(stored, *rows.blocks[1:]).tensor()  # the parts, joined by torch
    assert rows.shape == (2 * len(large), 1001)
    descriptor = os.open(tmp_path / "out", os.O_RDWR | os.O_CREAT)
    rows.write(descriptor, 3)
    os.close(descriptor)
    written = torch.frombuffer(bytearray((tmp_path / "out").read_bytes()[3:]), dtype=dtype).reshape(rows.shape)
    assert torch.equal(written, rows.tensor())
    assert torch.equal(written[: len(large) - 5], large[5:].to(dtype))
    assert len(expected) > len(large)
