"""Megatron-core's distributed checkpoints ("torch_dist") as a format: what is in one, and reading rows of a tensor.

The format is that of torch.distributed.checkpoint as megatron-core's `TorchDistSaveShardedStrategy` writes it:

| file | what |
|---|---|
| `.metadata` | pickled `Metadata`: global shape, dtype and chunks of every tensor, and the location of each chunk |
| `__<rank>_<n>.distcp` | chunks one after another, each a `torch.save` archive |
| `metadata.json` | format names and versions |
| `common.pt` | `torch.save` of everything that is not sharded |

Tensors are global: tensor parallel parts are joined, layers are stacked along a new first dimension (experts
along a second), so a checkpoint is independent of the parallelism that reads it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrainkit.checkpoint.formats.torch_save import OpaqueUnpickler, read_torch_save
from pretrainkit.checkpoint.lazy_tensor import LazyTensor, StoredTensor
from pretrainkit.errors import CheckpointError
from pretrainkit.files import read_json

METADATA_NAME = ".metadata"
CONFIG_NAME = "metadata.json"
COMMON_NAME = "common.pt"

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Content of metadata.json."""


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a global tensor, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    @cached_property
    def by_leading(self) -> dict[tuple[int, ...], list[Chunk]]:
        """Chunks by what they hold along the first one and the first two dimensions, where that is one index.

        DetectedCheckpoint by a look-up: a tensor of 100 layers with 100 experts has tens of thousands of chunks.
        """
        found: dict[tuple[int, ...], list[Chunk]] = {}
        for chunk in self.chunks:
            for depth in (1, 2):
                if chunk.sizes[:depth] == (1,) * depth:
                    found.setdefault(chunk.offsets[:depth], []).append(chunk)
        return found


def is_torch_dist(folder: Path) -> bool:
    """Whether a folder is a distributed checkpoint in this format."""
    if not (folder / CONFIG_NAME).is_file():
        return False
    config = read_json(folder / CONFIG_NAME)
    return isinstance(config, dict) and config.get("sharded_backend") == "torch_dist"


def read_metadata(folder: Path) -> dict[str, GlobalTensor]:
    """All tensors of a checkpoint by their stored name; no tensor is read.

    Raises CheckpointError when a file is missing or shorter than the metadata says.
    """
    path = folder / METADATA_NAME
    if not path.is_file():
        raise CheckpointError("incomplete checkpoint: no .metadata", where=str(folder), action=OLDER)
    try:
        with path.open("rb") as file:
            metadata = OpaqueUnpickler(file).load()
        described, stored = metadata.state_dict_metadata, metadata.storage_data
    except (pickle.UnpicklingError, AttributeError, EOFError, TypeError, ValueError) as error:
        raise CheckpointError(f"unreadable .metadata ({error})", where=str(folder), action=OLDER) from error
    places: dict[str, dict[tuple[int, ...], Any]] = {}
    ends: dict[str, int] = {}
    for index, info in stored.items():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{index.fqn} is stored transformed, which is not supported", where=str(folder))
        if getattr(index, "offset", None) is not None:
            places.setdefault(index.fqn, {})[tuple(index.offset)] = info
    _check_files(folder, ends)
    return {
        name: _global_tensor(folder, name, description, places.get(name, {}))
        for name, description in described.items()
        if hasattr(description, "chunks")
    }


OLDER = "use an older, complete checkpoint"


def _check_files(folder: Path, ends: Mapping[str, int]) -> None:
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.is_file() or path.stat().st_size < end:
            state = "cut" if path.is_file() else "missing"
            raise CheckpointError(f"incomplete checkpoint: {name} is {state}", where=str(folder), action=OLDER)


def _global_tensor(folder: Path, name: str, description: Any, places: Mapping[tuple[int, ...], Any]) -> GlobalTensor:
    chunks = []
    for chunk in description.chunks:
        info = places.get(tuple(chunk.offsets))
        if info is None:
            raise CheckpointError(f"no bytes for a part of {name}", where=str(folder), action=OLDER)
        path = folder / info.relative_path
        chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), path, info.offset, info.length))
    dtype = description.properties.state[0]  # TensorProperties pickles itself as a tuple that begins with it
    return GlobalTensor(name, tuple(description.size), dtype, tuple(chunks))


def read_rows(tensor: GlobalTensor, leading: tuple[int, ...], first: int, count: int) -> LazyTensor:
    """Rows of a global tensor at some leading indices (layer, expert).

    Chunks that follow one another along the rows stay separate blocks; chunks side by side are joined in memory.
    """
    depth, trailing = len(leading), tensor.shape[len(leading) + 1 :]
    parts = []
    for chunk in tensor.by_leading.get(leading) or tensor.chunks:
        inside = all(o <= i < o + n for i, o, n in zip(leading, chunk.offsets, chunk.sizes, strict=False))
        begin = max(first, chunk.offsets[depth])
        end = min(first + count, chunk.offsets[depth] + chunk.sizes[depth])
        if inside and begin < end:
            parts.append((begin, end, chunk))
    parts.sort(key=lambda part: (part[0], part[2].offsets))
    if all(part[2].sizes[depth + 1 :] == trailing for part in parts):
        blocks = [_chunk_rows(tensor, chunk, leading, begin, end) for begin, end, chunk in parts]
        if sum(end - begin for begin, end, _ in parts) == count:
            return LazyTensor.joined(blocks)
    return LazyTensor.of(_join(tensor, parts, leading, first, count))


def _join(
    tensor: GlobalTensor, parts: Sequence[tuple[int, int, Chunk]], leading: tuple[int, ...], first: int, count: int
) -> Tensor:
    depth, trailing = len(leading), tensor.shape[len(leading) + 1 :]
    joined = torch.empty((count, *trailing), dtype=tensor.dtype)
    covered = 0
    for begin, end, chunk in parts:
        place = joined.narrow(0, begin - first, end - begin)
        for dim, (offset, size) in enumerate(zip(chunk.offsets[depth + 1 :], chunk.sizes[depth + 1 :], strict=True)):
            place = place.narrow(dim + 1, offset, size)
        place.copy_(_chunk_rows(tensor, chunk, leading, begin, end).tensor())
        covered += place.numel()
    if covered != joined.numel():
        raise CheckpointError(f"{tensor.name}: a part is in no file", action=OLDER)
    return joined


def _chunk_rows(tensor: GlobalTensor, chunk: Chunk, leading: tuple[int, ...], begin: int, end: int) -> LazyTensor:
    """Rows `begin` to `end` of a global tensor, all in one chunk."""
    stored = read_torch_save(chunk.path, chunk.offset, chunk.num_bytes)
    if not isinstance(stored, StoredTensor) or torch.Size(stored.shape).numel() != torch.Size(chunk.sizes).numel():
        raise CheckpointError(
            f"{tensor.name}: a chunk doesn't hold the tensor that .metadata describes", where=str(chunk.path)
        )
    depth = len(leading)
    position = begin - chunk.offsets[depth]
    if stored.is_contiguous and all(size == 1 for size in chunk.sizes[:depth]):
        return LazyTensor.of(stored.view(chunk.sizes[depth:])).rows(position, end - begin)
    value = stored.read().reshape(chunk.sizes)
    for index, offset in zip(leading, chunk.offsets, strict=False):
        value = value[index - offset]
    return LazyTensor.of(value.narrow(0, position, end - begin))
