"""Reads megatron-core's distributed checkpoints ("torch_dist"): what is in one, and its rows as Hugging Face tensors.

The format is that of torch.distributed.checkpoint as megatron-core's `TorchDistSaveShardedStrategy` writes it:

| file | what |
|---|---|
| `.metadata` | pickled `Metadata`: global shape, dtype and chunks of every tensor, and the location of each chunk |
| `__<rank>_<n>.distcp` | chunks one after another, each a `torch.save` archive |
| `metadata.json` | format names and versions |
| `common.pt` | `torch.save` of everything that is not sharded |

Tensors are global: tensor parallel parts are joined, layers are stacked along a new first dimension (experts
along a second), so a checkpoint is independent of the parallelism that reads it. Checkpoints with separate tensors for
layers (`decoder.layers.0.`), experts (`experts.0.`) or gate and up (`weight_w`, `weight_v`), as newer versions of
megatron-core write them, are read too.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint import checksums
from pretrainkit.checkpoint.formats.megatron_lm import check_args, run_state
from pretrainkit.checkpoint.formats.torch_save import OpaqueUnpickler, read_torch_save
from pretrainkit.checkpoint.lazy_tensor import LazyTensor, StoredTensor
from pretrainkit.checkpoint.mapping import TensorMapping, check_names, check_tensors
from pretrainkit.checkpoint.transforms import unshard
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

EMBEDDING = "embedding.word_embeddings.weight"
"""Name of the embedding, behind the prefix of all names."""
MLP_NORM, LOCAL_MLP_NORM = ".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight"
"""The norm before experts, as Transformer Engine's layer spec names it, and Megatron's local one (where Transformer
Engine isn't installed), which renames it as if it belonged to a linear layer."""

_OLDER = "use an older, complete checkpoint"
_WRAPPERS = re.compile(r"^((module|model)\.)+")
_NOT_WEIGHTS = re.compile(r"^((chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine_state|opt_param_scheduler)")


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a global tensor, and the bytes that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    offset: int
    num_bytes: int
    saved: checksums.Part | None = None
    """What it was when it was saved; None where nothing says it."""


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
            metadata = OpaqueUnpickler(file).load()
        described, stored = metadata.state_dict_metadata, metadata.storage_data
    except (pickle.UnpicklingError, AttributeError, EOFError, TypeError, ValueError) as error:
        raise CheckpointError(f"unreadable .metadata ({error})", where=str(folder), action=_OLDER) from error
    places: dict[tuple[str, tuple[int, ...]], Any] = {}
    ends: dict[str, int] = {}
    for index, info in stored.items():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{index.fqn} is stored transformed, which is not supported", where=str(folder))
        if getattr(index, "offset", None) is not None:
            places[index.fqn, tuple(index.offset)] = info
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.is_file() or path.stat().st_size < end:
            state = "cut" if path.is_file() else "missing"
            raise CheckpointError(f"incomplete checkpoint: {name} is {state}", where=str(folder), action=_OLDER)
    tensors = {}
    saved = {(part.path, part.begin, part.num_bytes): part for part in checksums.parts_of(folder.parent)}
    for name, description in described.items():
        if not hasattr(description, "chunks"):
            continue
        chunks = []
        for chunk in description.chunks:
            info = places.get((name, tuple(chunk.offsets)))
            if info is None:
                raise CheckpointError(f"no bytes for a part of {name}", where=str(folder), action=_OLDER)
            path = folder / info.relative_path
            place = path, info.offset, info.length
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *place, saved.get(place)))
        dtype = description.properties.state[0]  # TensorProperties pickles itself as a tuple that begins with it
        tensors[name] = GlobalTensor(name, tuple(description.size), dtype, tuple(chunks))
    return tensors


def embedding_of(folder: Path) -> GlobalTensor:
    """The embedding in a torch_dist folder, whose name has the prefix of all names, and whose rows are padded."""
    tensors = read_metadata(folder).values()
    return next(tensor for tensor in tensors if tensor.name.endswith(EMBEDDING) and "optim" not in tensor.name)


def read_rows(tensor: GlobalTensor, leading: tuple[int, ...], first: int, count: int) -> LazyTensor:
    """Rows of a global tensor at some leading indices (layer, expert).

    Chunks that follow one another along the rows stay separate blocks; chunks side by side are joined, some rows at a
    time, when they are read.
    """
    depth, trailing = len(leading), tensor.shape[len(leading) + 1 :]
    parts: list[tuple[tuple[int, ...], StoredTensor]] = []
    """Rows, and where in the result they begin."""
    for chunk in tensor.by_leading.get(leading) or tensor.chunks:
        index = tuple(i - offset for i, offset in zip(leading, chunk.offsets, strict=False))
        row, *columns = chunk.offsets[depth:]
        begin, end = max(first, row), min(first + count, row + chunk.sizes[depth])
        if begin < end and all(0 <= i < size for i, size in zip(index, chunk.sizes, strict=False)):
            rows = _stored(tensor, chunk).view(itemgetter(index))
            parts.append(((begin - first, *columns), rows.narrow(0, begin - row, end - begin)))
    if sum(math.prod(rows.shape) for _, rows in parts) != count * math.prod(trailing):
        raise CheckpointError(f"{tensor.name}: a part is in no file", action=_OLDER)
    parts.sort(key=lambda part: part[0])
    if all(rows.shape[1:] == trailing for _, rows in parts):
        return LazyTensor.of(*(rows for _, rows in parts))

    def joined(first: int, count: int) -> torch.Tensor:
        result = torch.empty((count, *trailing), dtype=tensor.dtype)
        for (row, *columns), rows in parts:
            begin, end = max(first, row), min(first + count, row + rows.shape[0])
            if begin < end:
                place = (begin - first, *columns)
                piece = rows.narrow(0, begin - row, end - begin)
                result[tuple(slice(i, i + size) for i, size in zip(place, piece.shape, strict=True))] = piece.read()
        return result

    return LazyTensor.computed((count, *trailing), tensor.dtype, joined)


def _stored(tensor: GlobalTensor, chunk: Chunk) -> StoredTensor:
    """The bytes of a chunk, in its shape. Raises CheckpointError where they are not those that were saved."""
    if chunk.saved and (problem := chunk.saved.problem()):
        raise CheckpointError(f"{tensor.name}: {problem}", where=str(chunk.path), action=_OLDER)
    stored = read_torch_save(chunk.path, chunk.offset, chunk.num_bytes)
    if not isinstance(stored, StoredTensor) or math.prod(stored.shape) != math.prod(chunk.sizes):
        raise CheckpointError(
            f"{tensor.name}: a chunk doesn't hold the tensor that .metadata describes", where=str(chunk.path)
        )
    return stored.view(lambda whole: whole.view(chunk.sizes))


class TorchDistReader:
    """The weights of a distributed checkpoint, as Hugging Face tensors. Optimizer states are not touched."""

    def __init__(self, folder: Path, mappings: Sequence[TensorMapping], shape: ModelShape) -> None:
        self.shape, self.notes = shape, list[str]()
        if not (folder / COMMON_NAME).is_file():
            raise CheckpointError(f"incomplete checkpoint: no {COMMON_NAME}", where=str(folder), action=_OLDER)
        common = read_torch_save(folder / COMMON_NAME)
        check_args(common, shape, folder)
        self.run_state = run_state(common, folder)
        tensors, num_left_out = {}, 0
        for name, tensor in read_metadata(folder).items():
            bare = _WRAPPERS.sub("", name)
            if _NOT_WEIGHTS.match(bare):
                num_left_out += 1
            elif not bare.endswith("_extra_state"):
                tensors[bare] = tensor
        if shape.num_experts and not shape.features.has_kinds_of_layers:
            _take_local_norms(tensors, folder)
        found = {mapping: self._find(mapping, tensors) for mapping in mappings}
        used = {name for names, *_ in found.values() for name in names}
        missing = {str(mapping) for mapping, (names, *_) in found.items() if not names}
        check_names(used | missing, tensors, folder)
        self._parts = {}
        for mapping, (names, leading, counts) in found.items():
            parts = {name: tensors[name] for name in names}
            rows, *rest = mapping.megatron_shape
            if mapping.layout is Layout.VOCABULARY:
                rows = max(rows, parts[names[0]].shape[0])
            check_tensors(parts, [(*counts, rows // len(parts), *rest)] * len(parts), folder)
            self._parts[mapping] = [(part, leading) for part in parts.values()]
        self.dtypes = {mapping: parts[0][0].dtype for mapping, parts in self._parts.items()}
        if num_left_out:
            self.notes.append(f"{num_left_out} optimizer and training states left out")

    def _find(
        self, mapping: TensorMapping, tensors: Collection[str]
    ) -> tuple[list[str], tuple[int, ...], tuple[int, ...]]:
        """The names that hold a Megatron tensor, the leading indices to take, and the leading sizes to expect."""
        template = mapping.weight.megatron
        layer, layers = _index(mapping.layer, self.shape.num_layers)
        expert, experts = _index(mapping.expert, self.shape.num_experts)
        single = template.format(layer=mapping.layer)
        stacked = (template.replace("{layer}.", ""), layer + expert, layers + experts)
        own = (single.replace(".experts.experts.", f".experts.experts.{mapping.expert}."), (), ())
        for name, leading, counts in (stacked, (single, expert, experts), own):
            for names in ([name], [name + "_w", name + "_v"] if mapping.layout is Layout.GATED else [name]):
                if all(part in tensors for part in names):
                    return names, leading, counts
        return [], (), ()

    def read(self, mapping: TensorMapping) -> list[LazyTensor]:
        """The Hugging Face tensors of a mapping."""
        parts = self._parts[mapping]
        rows = [shape[0] for shape in mapping.shapes]
        if len(parts) > 1:  # gate and up apart
            return [read_rows(*part, 0, count) for part, count in zip(parts, rows, strict=True)]
        whole = read_rows(*parts[0], 0, sum(rows))
        return unshard(mapping.layout, [whole], rows=rows, groups=mapping.weight.groups)

    def padding(self, mapping: TensorMapping) -> LazyTensor | None:
        """The padding rows of a vocabulary tensor; None where there are none."""
        (tensor, leading), *_ = self._parts[mapping]
        rows = mapping.megatron_shape[0]
        if mapping.layout is not Layout.VOCABULARY or tensor.shape[0] == rows:
            return None
        return read_rows(tensor, leading, rows, tensor.shape[0] - rows)


def _take_local_norms(tensors: dict[str, GlobalTensor], folder: Path) -> None:
    """Rename the norms before experts that Megatron's local layer spec saved; they may be there under both names."""
    for local in [name for name in tensors if name.endswith(LOCAL_MLP_NORM)]:
        tensor, name = tensors.pop(local), local.replace(LOCAL_MLP_NORM, MLP_NORM)
        other = tensors.setdefault(name, tensor)
        chunks = zip(tensor.chunks, other.chunks, strict=False)
        if tensor.shape != other.shape or not all(
            torch.equal(_stored(tensor, ours).read(), _stored(other, theirs).read())
            for ours, theirs in chunks
            if ours != theirs
        ):
            raise CheckpointError(
                f"{local} and {name} differ",
                where=str(folder),
                needed="one norm before the experts: Megatron's layer specs read one of the two names",
            )


def _index(index: int | None, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((), ()) if index is None else ((index,), (count,))
