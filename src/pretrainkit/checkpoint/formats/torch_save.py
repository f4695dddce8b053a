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
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint.lazy_tensor import StoredTensor
from pretrainkit.errors import CheckpointError


class OpaqueObject:
    """Stands for an object of a class that is not imported; keeps its state as attributes."""

    def __init__(self, *_: Any, **__: Any) -> None:
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


def _member(owner: Any, _: str) -> OpaqueObject:
    """A member of an enum: some releases of Python 3.11 write it as an attribute of its class, others by its value."""
    return owner() if isinstance(owner, type) and issubclass(owner, OpaqueObject) else OpaqueObject()


class OpaqueUnpickler(pickle.Unpickler):
    """An unpickler that constructs only classes in `known`; all other objects become OpaqueObjects."""

    known: dict[tuple[str, str], Any] = {  # noqa: RUF012 - a table, never changed
        ("argparse", "Namespace"): argparse.Namespace,
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("collections", "defaultdict"): lambda *_: {},
        ("torch", "Size"): torch.Size,
        ("_codecs", "encode"): lambda text, encoding: text.encode(encoding),
        ("builtins", "getattr"): _member,
        ("builtins", "set"): set,
        ("builtins", "slice"): slice,
    }

    def find_class(self, module: str, name: str) -> Any:
        module = "builtins" if module == "__builtin__" else module  # its name in torch.save's pickle protocol, 2
        if (module, name) in self.known:
            return self.known[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return type(name, (OpaqueObject,), {"__module__": module})


class _ArchiveUnpickler(OpaqueUnpickler):
    """Rebuilds tensors as StoredTensors; for that a storage is its dtype and the key of its record."""

    def __init__(self, description: bytes, path: Path, position: Callable[[str], int]) -> None:
        super().__init__(io.BytesIO(description))
        self._path, self._position = path, position

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return self._rebuild
        if module == "torch._utils" and name == "_rebuild_parameter":
            return lambda data, *_: data
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return torch.storage._storage_type_to_dtype_map().get(name)
        return super().find_class(module, name)

    def persistent_load(self, identifier: Any) -> tuple[Any, str]:
        _, dtype, key, *_ = identifier
        return dtype, key

    def _rebuild(self, storage: tuple[Any, str], first: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
        dtype, key = storage
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"record data/{key} can't be mapped", where=str(self._path))
        meta = torch.empty(0, dtype=dtype, device="meta").as_strided(shape, stride, first)
        return StoredTensor(self._path, self._position(f"data/{key}"), meta)


def read_torch_save(path: Path, offset: int = 0, num_bytes: int | None = None) -> Any:
    """The objects of a `torch.save` file (or of one inside a file), tensors as StoredTensor.

    Raises CheckpointError when the file is cut, not such a file, or holds compressed records.
    """
    with _ArchiveFile(path, offset, path.stat().st_size if num_bytes is None else offset + num_bytes) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                description = archive.read(records["data.pkl"])
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise CheckpointError(
                f"not a readable torch.save file ({error})", where=str(path), action="the file is cut or damaged"
            ) from error

        def position(record: str) -> int:
            """Where a record's bytes begin: after its local header, whose two variable lengths are at 26 and 28."""
            info = records[record]
            if info.compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"record {record} can't be mapped", where=str(path))
            file.seek(info.header_offset + 26)
            lengths = (int.from_bytes(file.read(2), "little") for _ in range(2))
            return offset + info.header_offset + 30 + sum(lengths)

        try:
            return _ArchiveUnpickler(description, path, position).load()
        except (pickle.UnpicklingError, KeyError, EOFError, TypeError, ValueError) as error:
            raise CheckpointError(f"can't read the objects of a torch.save file ({error})", where=str(path)) from error


class _ArchiveFile(io.FileIO):
    """The bytes `begin` to `end` of a file as a file: zipfile of current Pythons refuses what precedes an archive."""

    def __init__(self, path: Path, begin: int, end: int) -> None:
        super().__init__(path)
        self._begin, self._end = begin, end
        self.seek(0)

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_CUR:
            position, whence = position + (self._end if whence == io.SEEK_END else self._begin), io.SEEK_SET
        return super().seek(position, whence) - self._begin

    def tell(self) -> int:
        return super().tell() - self._begin

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._end - self._begin - self.tell())
        return super().read(rest if size is None or size < 0 else min(size, rest)) or b""


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


@lru_cache(maxsize=4096)
def frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What torch.save writes before and after the bytes of a contiguous tensor; their checksum stays 0."""
    stream = _SkippingStream()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), stream)  # its memory is never touched, so none is used
    return stream.getvalue()[: stream.skipped_at], stream.getvalue()[stream.skipped_at :]


class _SkippingStream(io.BytesIO):
    """Leaves out the tensor's bytes, which torch.save skips with `seek`."""

    skipped_at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.skipped_at = self.tell()
        return offset
