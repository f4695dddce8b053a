"""Reads and writes files of `torch.save` without running their pickle's code or loading their tensors.

A `torch.save` file is an uncompressed zip archive: `<root>/data.pkl` describes the objects, one record
`<root>/data/<key>` holds each storage's bytes. The unpickler here knows tensors and plain containers and turns
everything else into opaque objects. Tensors come back as StoredTensor, which is mapped into memory only while used.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch

from pretrainkit.checkpoint.lazy_tensor import StoredTensor
from pretrainkit.errors import CheckpointError


class OpaqueObject:
    """Stands for an object of a class that is not imported; keeps its state as attributes."""

    def __init__(self, *arguments: Any, **_: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, value: Any) -> None: ...
    def extend(self, values: Any) -> None: ...
    def __call__(self, *_: Any, **__: Any) -> OpaqueObject:
        return self

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True)
class _Storage:
    """A storage that the pickle refers to."""

    dtype: torch.dtype | None
    key: str


class OpaqueUnpickler(pickle.Unpickler):
    """An unpickler that constructs only classes in `known`; all other objects become OpaqueObjects."""

    known: dict[tuple[str, str], Any] = {  # noqa: RUF012 - a table, never changed
        ("argparse", "Namespace"): argparse.Namespace,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "defaultdict"): lambda *_: {},
        ("torch", "Size"): torch.Size,
        ("_codecs", "encode"): lambda text, encoding: text.encode(encoding),
        ("builtins", "set"): set,
        ("builtins", "slice"): slice,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.known:
            return self.known[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return type(name, (OpaqueObject,), {"__module__": module})


class _ArchiveUnpickler(OpaqueUnpickler):
    def __init__(self, file: io.BytesIO, rebuild: Callable[..., StoredTensor]) -> None:
        super().__init__(file)
        self._rebuild = rebuild

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return self._rebuild
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda data, *_: data
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return _STORAGE_DTYPES.get(name)
        return super().find_class(module, name)

    def persistent_load(self, identifier: Any) -> _Storage:
        _, dtype, key, *_ = identifier
        return _Storage(dtype if isinstance(dtype, torch.dtype) else None, str(key))


_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Dtypes of the storage classes that torch.save writes."""


def read_torch_save(path: Path, offset: int = 0, num_bytes: int | None = None) -> Any:
    """The objects of a `torch.save` file (or of one inside a file), tensors as StoredTensor.

    Raises CheckpointError when the file is cut, not such a file, or holds compressed records.
    """
    with path.open("rb") as file:
        part: BinaryIO = file if num_bytes is None else _Part(file, offset, num_bytes)  # type: ignore[assignment]
        try:
            with zipfile.ZipFile(part) as archive:
                records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                description = archive.read(records["data.pkl"])
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise CheckpointError(
                f"not a readable torch.save file ({error})", where=str(path), action="the file is cut or damaged"
            ) from error

        def rebuild(storage: _Storage, first: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
            info = records[f"data/{storage.key}"]
            if info.compress_type != zipfile.ZIP_STORED or storage.dtype is None:
                raise CheckpointError(f"record {info.filename} can't be mapped", where=str(path))
            start = offset + _data_start(part, info) + first * storage.dtype.itemsize
            return StoredTensor(path, start, storage.dtype, tuple(shape), tuple(stride))

        try:
            return _ArchiveUnpickler(io.BytesIO(description), rebuild).load()
        except (pickle.UnpicklingError, KeyError, EOFError, TypeError, ValueError) as error:
            raise CheckpointError(f"can't read the objects of a torch.save file ({error})", where=str(path)) from error


def _data_start(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Position of a record's bytes: after its local header, whose two variable lengths are at 26 and 28."""
    file.seek(info.header_offset + 26)
    lengths = file.read(4)
    return info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, offset: int, num_bytes: int) -> None:
        self._file, self._offset, self._size, self._position = file, offset, num_bytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + position
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._size - self._position))
        self._file.seek(self._offset + self._position)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def write_torch_save(value: Any, path: Path) -> None:
    """`torch.save` with a helpful error: torch only reports an unexpected position when a disk is full."""
    try:
        torch.save(value, path)
    except RuntimeError as error:
        raise CheckpointError(
            f"writing failed ({str(error).splitlines()[0]})",
            where=str(path),
            action="check the free space and the quota of the disk",
        ) from error


@dataclass(frozen=True)
class Frame:
    """A `torch.save` file of one contiguous tensor is `head`, the tensor's bytes, `tail`."""

    head: bytes
    tail: bytes


@lru_cache(maxsize=4096)
def frame(shape: tuple[int, ...], dtype: torch.dtype) -> Frame:
    """The frame that torch.save writes for a tensor of this shape and dtype; the checksum of the bytes stays 0."""
    stream = _SkippingStream()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), stream)  # its memory is never touched, so none is used
    head, tail = stream.parts
    return Frame(bytes(head), bytes(tail))


class _SkippingStream:
    """Collects what is written before and after the tensor's bytes, which torch.save skips with `seek`."""

    def __init__(self) -> None:
        self.parts = [bytearray()]

    def write(self, data: bytes) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.parts.append(bytearray())
        return offset

    def flush(self) -> None:
        """Nothing is buffered."""
