"""Writes Megatron-core's distributed checkpoints (see `torch_dist` for the format), one tensor at a time."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint.formats.torch_dist import COMMON_NAME, CONFIG_NAME, FORMAT, METADATA_NAME
from pretrainkit.checkpoint.formats.torch_save_writer import frame, save_archive
from pretrainkit.checkpoint.lazy_tensor import Rows, pwrite_all, tensors
from pretrainkit.checkpoint.mapping import Entry, MegatronContent
from pretrainkit.checkpoint.transforms import merge_qkv
from pretrainkit.config.schema import ModelShape
from pretrainkit.files import write_json
from pretrainkit.models.family import Layout


class TorchDistTarget:
    """Writes a distributed checkpoint of weights into an empty folder, layers and experts stacked."""

    kind = "torch_dist"

    def __init__(
        self,
        folder: Path,
        content: MegatronContent,
        *,
        prefix: str,
    ) -> None:
        self.folder, self.dtypes, self.shape = folder, content.dtypes, content.shape
        self._prefix, self._common, self._padded_rows = prefix, content.common, content.padded_rows
        self.parts = content.parts()
        """Entries by file: one worker writes one file."""
        self._written: dict[int, list[_WrittenChunk]] = {}
        self._extra_states = _extra_state_names(content.entries, content.shape, prefix)

    def write_part(self, part: int, values: Iterable[tuple[Entry, Sequence[Rows]]]) -> None:
        """Write one file; `values` come in the order of `parts[part]`."""
        name = f"__0_{part}.distcp"
        chunks = []
        with (self.folder / name).open("wb", buffering=0) as file:
            position = 0
            if part == 0:
                state = io.BytesIO()
                torch.save([None], state)
                for key in self._extra_states:
                    size = pwrite_all(file.fileno(), state.getvalue(), position)
                    chunks.append(_WrittenChunk(key, None, None, name, position, size))
                    position += size
            for entry, of_entry in values:
                leading = tuple(index for index in (entry.layer, entry.expert) if index is not None)
                for first_row, rows in self._pieces(entry, of_entry):
                    offsets = (*leading, first_row, *(0 for _ in rows.shape[1:]))
                    sizes = (*(1 for _ in leading), *rows.shape)
                    size = _write_tensor(file.fileno(), position, rows, sizes)
                    chunks.append(_WrittenChunk(self._name(entry), offsets, sizes, name, position, size))
                    position += size
            os.fsync(file.fileno())
        self._written[part] = chunks

    def _pieces(self, entry: Entry, values: Sequence[Rows]) -> list[tuple[int, Rows]]:
        """An entry's Megatron tensor as chunks, one below the other, so that what needs no rearranging isn't copied."""
        if entry.layout is Layout.QKV:
            query, key, value = tensors(values)
            return [(0, Rows.of(merge_qkv(query, key, value, self.shape.num_query_groups)))]
        pieces, first = [], 0
        for rows in values:
            pieces.append((first, rows))
            first += rows.shape[0]
        if entry.layout is Layout.VOCABULARY and self._padded_rows > first:
            zeros = torch.zeros(self._padded_rows - first, *values[0].shape[1:], dtype=values[0].dtype)
            pieces.append((first, Rows.of(zeros)))
        return pieces

    def _name(self, entry: Entry) -> str:
        return self._prefix + entry.weight.megatron.replace("{layer}.", "")

    def _global_shape(self, entry: Entry) -> tuple[int, ...]:
        leading = [self.shape.num_layers] if entry.layer is not None else []
        leading += [self.shape.num_experts] if entry.expert is not None else []
        rows, *rest = entry.megatron_shape
        return (*leading, max(rows, self._padded_rows) if entry.layout is Layout.VOCABULARY else rows, *rest)

    def finish(self) -> None:
        """Write metadata and common state; the checkpoint is complete after it."""
        from torch.distributed.checkpoint import metadata as dcp
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        described: dict[str, Any] = {}
        stored = {}
        for entry in (entry for part in self.parts for entry in part):
            properties = dcp.TensorProperties(dtype=self.dtypes[entry], memory_format=torch.contiguous_format)
            size = torch.Size(self._global_shape(entry))
            described.setdefault(self._name(entry), dcp.TensorStorageMetadata(properties, size, []))
        for chunk in (chunk for part in sorted(self._written) for chunk in self._written[part]):
            if chunk.offsets is None or chunk.sizes is None:
                described[chunk.name] = dcp.BytesStorageMetadata()
                index = dcp.MetadataIndex(chunk.name)
            else:
                offsets = torch.Size(chunk.offsets)
                described[chunk.name].chunks.append(dcp.ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
                index = dcp.MetadataIndex(chunk.name, offsets)
            stored[index] = _StorageInfo(chunk.file, chunk.begin, chunk.num_bytes)
        with (self.folder / METADATA_NAME).open("wb") as file:
            pickle.dump(dcp.Metadata(described, storage_data=stored), file)
        save_archive(dict(self._common), self.folder / COMMON_NAME)
        write_json(self.folder / CONFIG_NAME, FORMAT)


def _write_tensor(descriptor: int, offset: int, rows: Rows, shape: tuple[int, ...]) -> int:
    """What `torch.save` of the tensor in this shape would write at an offset of a file; the number of bytes."""
    around = frame(shape, rows.dtype)
    size = pwrite_all(descriptor, around.head, offset)
    rows.write(descriptor, offset + size)
    size += rows.num_bytes
    return size + pwrite_all(descriptor, around.tail, offset + size)


@dataclass(frozen=True)
class _WrittenChunk:
    name: str
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    file: str
    begin: int
    num_bytes: int


def _extra_state_names(entries: Sequence[Entry], shape: ModelShape, prefix: str) -> list[str]:
    """Names of the (empty) extra states that Transformer Engine's modules insist on finding.

    Which modules have one differs between its versions; readers ignore those they don't have.
    """
    names = []
    for entry in entries:
        module = entry.weight.megatron.rpartition(".")[0]
        if entry.weight.megatron.endswith("layer_norm_weight"):
            continue
        last = module.rpartition(".")[2]
        if not (last.startswith("linear_") or last.endswith("layernorm")) or entry.weight.megatron.endswith("bias"):
            continue
        names.append(_extra_state(module, entry.layer, entry.expert, shape))
        if last == "linear_proj":
            names.append(_extra_state(module[: -len(last)] + "core_attention", entry.layer, None, shape))
    return [prefix + name for name in names]


def _extra_state(module: str, layer: int | None, expert: int | None, shape: ModelShape) -> str:
    """megatron-core's `ShardedObject.unique_key`."""
    places = [
        (index, count) for index, count in ((layer, shape.num_layers), (expert, shape.num_experts)) if index is not None
    ]
    offsets, counts = zip(*(places or [(0, 1)]), strict=True)
    key = module.replace("{layer}.", "")
    return f"{key}._extra_state/shard_{'.'.join(map(str, offsets))}_{'.'.join(map(str, counts))}"
