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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint.formats.weight_files import weight_files
from pretrainkit.checkpoint.lazy_tensor import LazyTensor, StoredTensor, pwrite_all
from pretrainkit.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # bytes; the safetensors package refuses longer ones


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file. Raises CheckpointError when it is truncated, has gaps or isn't safetensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise CheckpointError("not a complete safetensors file", where=str(path), action=_AGAIN)
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"unreadable safetensors header ({error})", where=str(path), action=_AGAIN) from error
    start = 8 + length
    tensors = {name: _location(path, start, name, info) for name, info in header.items() if name != "__metadata__"}
    end = start
    for name, location in sorted(tensors.items(), key=lambda item: item[1].offset):
        if location.offset != end and location.num_bytes:
            raise CheckpointError(f"gap or overlap before tensor {name}", where=str(path), action=_AGAIN)
        end = max(end, location.offset + location.num_bytes)
    if end != size:
        raise CheckpointError(f"{size} bytes, but its header describes {end}", where=str(path), action=_AGAIN)
    return tensors


_AGAIN = "the file is cut or damaged: fetch or write it again"


def _location(path: Path, start: int, name: str, info: Mapping[str, Any]) -> StoredTensor:
    dtype = DTYPES.get(info["dtype"])
    if dtype is None:
        raise CheckpointError(f"tensor {name} has dtype {info['dtype']}, which is not supported", where=str(path))
    begin, end = info["data_offsets"]
    location = StoredTensor.contiguous(path, start + begin, dtype, tuple(info["shape"]))
    if location.num_bytes != end - begin:
        raise CheckpointError(f"tensor {name}: shape and length disagree", where=str(path), action=_AGAIN)
    return location


@dataclass(frozen=True)
class TensorPlan:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsWriter:
    """Writes a file of tensors whose names, shapes, dtypes and order are given in advance."""

    def __init__(self, descriptor: int, plan: Iterable[TensorPlan]) -> None:
        self._descriptor, self._pending = descriptor, list(plan)[::-1]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for tensor in reversed(self._pending):
            end = position + tensor.num_bytes
            header[tensor.name] = {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8, as the safetensors package does it
        self._position = pwrite_all(descriptor, len(text).to_bytes(8, "little") + text, 0)

    def write(self, value: LazyTensor) -> None:
        """Write the next planned tensor."""
        plan = self._pending.pop()
        assert value.shape == plan.shape and value.dtype == plan.dtype, (plan, value.shape, value.dtype)
        value.write(self._descriptor, self._position)
        self._position += plan.num_bytes

    def finish(self) -> None:
        """Flush the file after the last planned tensor."""
        assert not self._pending, self._pending
        os.fsync(self._descriptor)


def open_by_package(folder: Path, stack: ExitStack) -> tuple[Callable[[str], torch.Tensor], set[str]]:
    """A reader of a model's tensors by name, and their names, through the safetensors package, until `stack` closes.

    For checks: they must not read with the code that wrote.
    """
    from safetensors import safe_open

    files = {}
    for path in filter(Path.is_file, weight_files(folder)):  # missing files show up as missing names
        handle = stack.enter_context(safe_open(path, framework="pt"))
        files.update(dict.fromkeys(handle.keys(), handle))
    return lambda name: files[name].get_tensor(name), set(files)
