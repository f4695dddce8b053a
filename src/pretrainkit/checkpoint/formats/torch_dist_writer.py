"""Writes Megatron-core's distributed checkpoints (see `torch_dist` for the format), one tensor at a time."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint.formats.torch_dist import (
    COMMON_NAME,
    CONFIG_NAME,
    FORMAT,
    LOCAL_MLP_NORM,
    METADATA_NAME,
    MLP_NORM,
)
from pretrainkit.checkpoint.formats.torch_save import frame, write_torch_save
from pretrainkit.checkpoint.lazy_tensor import LazyTensor, pwrite_all
from pretrainkit.checkpoint.mapping import TensorMapping
from pretrainkit.checkpoint.plan import ConversionPlan
from pretrainkit.checkpoint.transforms import merge_rows
from pretrainkit.config.schema import ModelShape
from pretrainkit.files import write_json
from pretrainkit.models.family import Layout


class TorchDistWriter:
    """Writes a distributed checkpoint of weights into an empty folder.

    Experts are stacked, and layers unless some have other tensors (dense ones among those with experts), as
    megatron-core has it.
    """

    def __init__(self, folder: Path, plan: ConversionPlan, common: Mapping[str, Any], *, prefix: str) -> None:
        self.folder, self.dtypes, self.shape = folder, plan.dtypes, plan.shape
        self._common, self._prefix, self._padded_rows = common, prefix, plan.padded_vocab_size
        self.parts = plan.parts()
        """Tensors by file: one worker writes one file."""
        self._written: dict[int, list[tuple[str, tuple[torch.Size, torch.Size] | None, tuple[str, int, int]]]] = {}
        """By part: name, offsets and sizes of a chunk (None for extra states), and its file, position and bytes."""
        self._extra_states = _extra_state_names(plan.mappings, plan.shape, prefix)

    def write_part(self, part: int, values: Iterable[tuple[TensorMapping, Sequence[LazyTensor]]]) -> None:
        """Write one file; `values` come in the order of `parts[part]`."""
        name = f"__0_{part}.distcp"
        written = self._written[part] = []
        position = 0
        with (self.folder / name).open("wb", buffering=0) as file:
            if part == 0:
                state = io.BytesIO()
                torch.save([None], state)
                for key in self._extra_states:
                    size = pwrite_all(file.fileno(), state.getvalue(), position)
                    written.append((key, None, (name, position, size)))
                    position += size
            for mapping, tensors_hf in values:
                leading = [index for index, _ in _leading(mapping.layer, mapping.expert, self.shape)]
                for first_row, rows in self._pieces(mapping, tensors_hf):
                    offsets = torch.Size((*leading, first_row, *(0 for _ in rows.shape[1:])))
                    sizes = torch.Size((*(1 for _ in leading), *rows.shape))
                    size = _write_tensor(file.fileno(), position, rows, sizes)
                    written.append((self._name(mapping), (offsets, sizes), (name, position, size)))
                    position += size
            os.fsync(file.fileno())

    def _pieces(self, mapping: TensorMapping, values: Sequence[LazyTensor]) -> list[tuple[int, LazyTensor]]:
        """The Megatron tensor as chunks with their first rows; what needs no rearranging is not copied in memory."""
        if mapping.layout is Layout.QKV:
            return [(0, merge_rows(values, mapping.weight.groups))]
        pieces, first = [], 0
        for rows in values:
            pieces.append((first, rows))
            first += rows.shape[0]
        if mapping.layout is Layout.VOCABULARY and self._padded_rows > first:
            zeros = torch.zeros(self._padded_rows - first, *values[0].shape[1:], dtype=values[0].dtype)
            pieces.append((first, LazyTensor.of(zeros)))
        return pieces

    def _name(self, mapping: TensorMapping) -> str:
        return self._prefix + _key(mapping.weight.megatron, mapping.layer, self.shape)

    def finish(self) -> None:
        """Write metadata and common state; the checkpoint is complete after it."""
        from torch.distributed.checkpoint import metadata as dcp  # 1.2 s and 47 MB
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        described: dict[str, Any] = {}
        for mapping in (mapping for part in self.parts for mapping in part):
            properties = dcp.TensorProperties(dtype=self.dtypes[mapping], memory_format=torch.contiguous_format)
            counts = [count for _, count in _leading(mapping.layer, mapping.expert, self.shape)]
            rows, *rest = mapping.megatron_shape
            rows = max(rows, self._padded_rows) if mapping.layout is Layout.VOCABULARY else rows
            size = torch.Size((*counts, rows, *rest))
            described.setdefault(self._name(mapping), dcp.TensorStorageMetadata(properties, size, []))
        stored = {}
        for name, chunk, place in (written for part in sorted(self._written) for written in self._written[part]):
            if chunk is None:
                described[name] = dcp.BytesStorageMetadata()
            else:
                described[name].chunks.append(dcp.ChunkStorageMetadata(*chunk))
            stored[dcp.MetadataIndex(name, chunk and chunk[0])] = _StorageInfo(*place)
        norms = [name for name in described if name.endswith(MLP_NORM) and _stacks_layers(self.shape)]
        for name in norms:  # the same bytes under both names
            local = name.replace(MLP_NORM, LOCAL_MLP_NORM)
            described[local] = described[name]
            for chunk in described[name].chunks:
                stored[dcp.MetadataIndex(local, chunk.offsets)] = stored[dcp.MetadataIndex(name, chunk.offsets)]
        with (self.folder / METADATA_NAME).open("wb") as file:
            pickle.dump(dcp.Metadata(described, storage_data=stored), file)
        write_torch_save(dict(self._common), self.folder / COMMON_NAME)
        write_json(self.folder / CONFIG_NAME, FORMAT)


def _write_tensor(descriptor: int, offset: int, rows: LazyTensor, shape: tuple[int, ...]) -> int:
    """What `torch.save` of the tensor in this shape would write at an offset of a file; the number of bytes."""
    head, tail = frame(shape, rows.dtype)
    end = offset + pwrite_all(descriptor, head, offset)
    end += rows.write(descriptor, end)
    return end + pwrite_all(descriptor, tail, end) - offset


def _stacks_layers(shape: ModelShape) -> bool:
    return not shape.features.has_kinds_of_layers


def _key(name: str, layer: int | None, shape: ModelShape) -> str:
    """The stored name of a tensor of the table, or of another of its modules."""
    return name.replace("{layer}.", "" if _stacks_layers(shape) else f"{layer}.")


def _leading(layer: int | None, expert: int | None, shape: ModelShape) -> list[tuple[int, int]]:
    """Index and size of the dimensions that precede those of one layer's, one expert's tensor."""
    places = ((layer if _stacks_layers(shape) else None, shape.num_layers), (expert, shape.num_experts))
    return [(index, count) for index, count in places if index is not None]


def _extra_state_names(mappings: Sequence[TensorMapping], shape: ModelShape, prefix: str) -> list[str]:
    """Names of the (empty) extra states that Transformer Engine's modules insist on finding.

    Which modules have one differs between its versions; readers ignore those they don't have.
    """
    names = []
    for mapping in mappings:
        module, _, parameter = mapping.weight.megatron.rpartition(".")
        block, _, last = module.rpartition(".")
        if parameter != "weight" or not (
            last.startswith(("linear_", "in_proj_", "out_proj")) or last.endswith("layernorm")
        ):
            continue
        names.append(_extra_state(module, mapping.layer, mapping.expert, shape))
        if last == "linear_proj":
            names.append(_extra_state(f"{block}.core_attention", mapping.layer, None, shape))
    return [prefix + name for name in names]


def _extra_state(module: str, layer: int | None, expert: int | None, shape: ModelShape) -> str:
    """megatron-core's `ShardedObject.unique_key`."""
    offsets, counts = zip(*(_leading(layer, expert, shape) or [(0, 1)]), strict=True)
    return f"{_key(module, layer, shape)}._extra_state/shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, counts))}"
