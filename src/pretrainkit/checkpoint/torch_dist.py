"""Megatron-core's distributed checkpoints ("torch_dist") as a source, one tensor at a time.

The format is that of torch.distributed.checkpoint as megatron-core's `TorchDistSaveShardedStrategy` writes it:

| file | what |
|---|---|
| `.metadata` | pickled `Metadata`: global shape, dtype and chunks of every tensor, and where each chunk lies |
| `__<rank>_<n>.distcp` | chunks one after another, each a `torch.save` archive |
| `metadata.json` | format names and versions |
| `common.pt` | `torch.save` of everything that is not sharded |

Tensors are global: tensor parallel parts are joined, layers are stacked along a new first dimension (experts
along a second), so a checkpoint is independent of the parallelism that reads it. Checkpoints that keep layers
(`decoder.layers.0.`), experts (`experts.0.`) or gate and up (`weight_w`, `weight_v`) under names of their own,
as newer versions of megatron-core write them, are read too.
"""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrainkit.checkpoint.archive import InertUnpickler, StoredTensor, read_archive
from pretrainkit.checkpoint.mapping import Entry
from pretrainkit.checkpoint.megatron_args import check_args
from pretrainkit.checkpoint.rows import Rows
from pretrainkit.checkpoint.transforms import split_qkv
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import CheckpointError
from pretrainkit.files import read_json
from pretrainkit.models.family import Layout

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

_WRAPPERS = re.compile(r"^((module|model)\.)+")
_NOT_WEIGHTS = re.compile(r"^((chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine_state|opt_param_scheduler)")


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a global tensor and the bytes it lies in."""

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

        Found by a look-up: a tensor of 100 layers with 100 experts has tens of thousands of chunks.
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
        raise CheckpointError("incomplete checkpoint: no .metadata", where=str(folder), action=_OLDER)
    try:
        with path.open("rb") as file:
            metadata = InertUnpickler(file).load()
        described, stored = metadata.state_dict_metadata, metadata.storage_data
    except (pickle.UnpicklingError, AttributeError, EOFError, TypeError, ValueError) as error:
        raise CheckpointError(f"unreadable .metadata ({error})", where=str(folder), action=_OLDER) from error
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


_OLDER = "use an older, complete checkpoint"


def _check_files(folder: Path, ends: Mapping[str, int]) -> None:
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.is_file() or path.stat().st_size < end:
            state = "cut" if path.is_file() else "missing"
            raise CheckpointError(f"incomplete checkpoint: {name} is {state}", where=str(folder), action=_OLDER)


def _global_tensor(folder: Path, name: str, description: Any, places: Mapping[tuple[int, ...], Any]) -> GlobalTensor:
    chunks = []
    for chunk in description.chunks:
        info = places.get(tuple(chunk.offsets))
        if info is None:
            raise CheckpointError(f"no bytes for a part of {name}", where=str(folder), action=_OLDER)
        path = folder / info.relative_path
        chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), path, info.offset, info.length))
    dtype = description.properties.state[0]  # TensorProperties pickles itself as a tuple that begins with it
    return GlobalTensor(name, tuple(description.size), dtype, tuple(chunks))


def read_rows(tensor: GlobalTensor, leading: tuple[int, ...], first: int, count: int) -> Rows:
    """Rows of a global tensor at some leading indices (layer, expert).

    Chunks that lie one below the other stay separate blocks; chunks side by side are joined in memory.
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
            return Rows.joined(blocks)
    return Rows.of(_join(tensor, parts, leading, first, count))


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
        raise CheckpointError(f"{tensor.name}: a part is in no file", action=_OLDER)
    return joined


def _chunk_rows(tensor: GlobalTensor, chunk: Chunk, leading: tuple[int, ...], begin: int, end: int) -> Rows:
    """Rows `begin` to `end` of a global tensor, all in one chunk."""
    stored = read_archive(chunk.path, chunk.offset, chunk.num_bytes)
    if not isinstance(stored, StoredTensor) or torch.Size(stored.shape).numel() != torch.Size(chunk.sizes).numel():
        raise CheckpointError(
            f"{tensor.name}: a chunk doesn't hold the tensor that .metadata describes", where=str(chunk.path)
        )
    depth = len(leading)
    position = begin - chunk.offsets[depth]
    if stored.is_contiguous and all(size == 1 for size in chunk.sizes[:depth]):
        return Rows.of(stored.view(chunk.sizes[depth:])).rows(position, end - begin)
    value = stored.read().reshape(chunk.sizes)
    for index, offset in zip(leading, chunk.offsets, strict=False):
        value = value[index - offset]
    return Rows.of(value.narrow(0, position, end - begin))


class TorchDistSource:
    """The weights of a distributed checkpoint, as Hugging Face tensors. Optimizer states are not touched."""

    kind = "torch_dist"

    def __init__(self, folder: Path, entries: Sequence[Entry], shape: ModelShape) -> None:
        self.folder, self.shape = folder, shape
        self.left_out: list[str] = []
        self.padding_rows = 0
        self._tensors: dict[str, GlobalTensor] = {}
        _check_common(folder, shape)
        for name, tensor in read_metadata(folder).items():
            bare = _WRAPPERS.sub("", name)
            if _NOT_WEIGHTS.match(bare):
                self.left_out.append(name)
            elif not bare.endswith("_extra_state"):
                self._tensors[bare] = tensor
        self._parts = {entry: self._find(entry) for entry in entries}
        used = {tensor.name for parts in self._parts.values() for tensor, _ in parts}
        unknown = sorted(tensor.name for tensor in self._tensors.values() if tensor.name not in used)
        if unknown:
            raise CheckpointError(
                f"{len(unknown)} tensors that the architecture doesn't have: {', '.join(unknown[:8])}",
                where=str(folder),
                needed=f"a {shape.family} checkpoint of the shape that config.json describes",
            )

    def _find(self, entry: Entry) -> list[tuple[GlobalTensor, tuple[int, ...]]]:
        """The global tensors that hold an entry, each with the leading indices (layer, expert) to take."""
        for name, leading, counts in self._stored_names(entry):
            names = [name + "_w", name + "_v"] if entry.layout is Layout.GATED and name not in self._tensors else [name]
            if not all(part in self._tensors for part in names):
                continue
            found = [self._tensors[part] for part in names]
            self._check_shape(entry, found, counts)
            return [(tensor, leading) for tensor in found]
        raise CheckpointError(
            f"tensor {entry.weight.megatron.replace('{layer}.', '')} is missing"
            + (f" (layer {entry.layer})" if entry.layer is not None else ""),
            where=str(self.folder),
            needed=f"all tensors of a {self.shape.family} model with {self.shape.num_layers} layers",
        )

    def _stored_names(self, entry: Entry) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """The names an entry may have, each with the leading indices to take and the leading sizes to expect."""
        template = entry.weight.megatron
        layer, layers = _index(entry.layer, self.shape.num_layers)
        expert, experts = _index(entry.expert, self.shape.num_experts)
        single = template.format(layer=entry.layer)
        names = [(template.replace("{layer}.", ""), layer + expert, layers + experts), (single, expert, experts)]
        if expert:
            names.append((single.replace(".experts.experts.", f".experts.experts.{entry.expert}."), (), ()))
        return names

    def _check_shape(self, entry: Entry, tensors: Sequence[GlobalTensor], counts: tuple[int, ...]) -> None:
        wanted = [*counts, *entry.megatron_shape]
        if len(tensors) > 1:
            wanted[len(counts)] //= len(tensors)
        for tensor in tensors:
            found = list(tensor.shape)
            if entry.layout is Layout.VOCABULARY and found[0] > wanted[0]:
                self.padding_rows = max(self.padding_rows, found[0] - wanted[0])
                found[0] = wanted[0]
            if found != wanted:
                raise CheckpointError(
                    f"{tensor.name} has shape {list(tensor.shape)}",
                    where=str(self.folder),
                    needed=f"{wanted}, which follows from config.json",
                )

    def dtype(self, entry: Entry) -> torch.dtype:
        return self._parts[entry][0][0].dtype

    def read(self, entry: Entry) -> list[Rows]:
        """The Hugging Face tensors of an entry."""
        parts = self._parts[entry]
        rows = [shape[0] for shape in entry.shapes]
        if entry.layout is Layout.QKV:
            merged = read_rows(*parts[0], 0, sum(rows)).tensor()
            return [Rows.of(part) for part in split_qkv(merged, self.shape.num_query_groups, rows)]
        if entry.layout is Layout.GATED and len(parts) == 1:
            return [read_rows(*parts[0], 0, rows[0]), read_rows(*parts[0], rows[0], rows[1])]
        return [read_rows(tensor, leading, 0, count) for (tensor, leading), count in zip(parts, rows, strict=True)]

    def notes(self) -> list[str]:
        """What was left out, for the report."""
        notes = []
        if self.left_out:
            notes.append(f"{len(self.left_out)} optimizer and training states left out")
        if self.padding_rows:
            notes.append(f"{self.padding_rows} padding rows of the vocabulary taken away")
        return notes


def _index(index: int | None, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((), ()) if index is None else ((index,), (count,))


def _check_common(folder: Path, shape: ModelShape) -> None:
    """Compare Megatron-LM's arguments, where the checkpoint has them, with the shape."""
    path = folder / COMMON_NAME
    if not path.is_file():
        raise CheckpointError(f"incomplete checkpoint: no {COMMON_NAME}", where=str(folder), action=_OLDER)
    common = read_archive(path)
    if isinstance(common, dict) and isinstance(common.get("args"), argparse.Namespace):
        check_args(common["args"], shape, str(folder))
