"""Reads and writes Hugging Face's safetensors files one tensor at a time.

The safetensors package maps or loads entire files; here only the tensor in use is in memory, so that the memory of a
conversion stays flat. The format, all little-endian:

| bytes | what |
|---|---|
| 0-7 | n, length of the header, u64 |
| 8 to 8+n | header, JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, optional "__metadata__" |
| 8+n on | the tensors' bytes, contiguous, row-major, in the order of their offsets, without gaps |
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES as DTYPES

from pretrainkit.checkpoint.formats.hf_files import weight_files
from pretrainkit.checkpoint.lazy_tensor import LazyTensor, StoredTensor, pwrite_all
from pretrainkit.errors import CheckpointError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file. Raises CheckpointError when it is truncated, has gaps or isn't safetensors."""
    try:
        with safe_open(path, framework="np"):
            pass  # it checks that the header describes every byte of the file once
    except SafetensorError as error:
        raise CheckpointError(
            f"not a complete safetensors file ({error})",
            where=str(path),
            action="the file is cut or damaged: fetch or write it again",
        ) from error
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        if info["dtype"] not in DTYPES:
            raise CheckpointError(f"tensor {name} has dtype {info['dtype']}, which is not supported", where=str(path))
        meta = described(info["shape"], DTYPES[info["dtype"]])
        tensors[name] = StoredTensor(path, start + info["data_offsets"][0], meta)
    return tensors


def described(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """A row-major tensor without elements."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def write_safetensors(path: Path, plan: Mapping[str, torch.Tensor], values: Iterable[LazyTensor]) -> None:
    """Write and flush a file of tensors whose names, shapes and dtypes are given in advance, in the order of `plan`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in plan.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8, as the safetensors package does it
    with path.open("wb", buffering=0) as file:
        position = pwrite_all(file.fileno(), len(text).to_bytes(8, "little") + text, 0)
        for tensor, value in zip(plan.values(), values, strict=True):
            assert value.shape == tensor.shape and value.dtype == tensor.dtype, (tensor, value.shape, value.dtype)
            position += value.write(file.fileno(), position)
        os.fsync(file.fileno())


def open_by_package(folder: Path, stack: ExitStack) -> tuple[Callable[[str], torch.Tensor], set[str]]:
    """A reader of a model's tensors by name, and their names, through the safetensors package, until `stack` closes.

    For checks: they must not read with the code that wrote.
    """
    files = {}
    for path in filter(Path.is_file, weight_files(folder)):  # missing files show up as missing names
        handle = stack.enter_context(safe_open(path, framework="pt"))
        files.update(dict.fromkeys(handle.keys(), handle))
    return lambda name: files[name].get_tensor(name), set(files)
