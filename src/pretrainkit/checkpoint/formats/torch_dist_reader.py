"""Reads Hugging Face tensors from megatron-core's distributed checkpoints (see `torch_dist` for the format).

Checkpoints with separate tensors for layers (`decoder.layers.0.`), experts (`experts.0.`) or gate and up (`weight_w`,
`weight_v`), as newer versions of megatron-core write them, are read too.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from pretrainkit.checkpoint.formats.megatron_lm import check_args
from pretrainkit.checkpoint.formats.torch_dist import COMMON_NAME, OLDER, GlobalTensor, read_metadata, read_rows
from pretrainkit.checkpoint.formats.torch_save import read_torch_save
from pretrainkit.checkpoint.lazy_tensor import LazyTensor
from pretrainkit.checkpoint.mapping import TensorMapping
from pretrainkit.checkpoint.transforms import split_qkv
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import CheckpointError
from pretrainkit.models.family import Layout

_WRAPPERS = re.compile(r"^((module|model)\.)+")
_NOT_WEIGHTS = re.compile(r"^((chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine_state|opt_param_scheduler)")


class TorchDistReader:
    """The weights of a distributed checkpoint, as Hugging Face tensors. Optimizer states are not touched."""

    def __init__(self, folder: Path, mappings: Sequence[TensorMapping], shape: ModelShape) -> None:
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
        self._parts = {mapping: self._find(mapping) for mapping in mappings}
        used = {tensor.name for parts in self._parts.values() for tensor, _ in parts}
        unknown = sorted(tensor.name for tensor in self._tensors.values() if tensor.name not in used)
        if unknown:
            raise CheckpointError(
                f"{len(unknown)} tensors that the architecture doesn't have: {', '.join(unknown[:8])}",
                where=str(folder),
                needed=f"a {shape.family} checkpoint of the shape that config.json describes",
            )

    def _find(self, mapping: TensorMapping) -> list[tuple[GlobalTensor, tuple[int, ...]]]:
        """The global tensors that hold a Megatron tensor, each with the leading indices (layer, expert) to take."""
        for name, leading, counts in self._stored_names(mapping):
            names = (
                [name + "_w", name + "_v"] if mapping.layout is Layout.GATED and name not in self._tensors else [name]
            )
            if not all(part in self._tensors for part in names):
                continue
            found = [self._tensors[part] for part in names]
            self._check_shape(mapping, found, counts)
            return [(tensor, leading) for tensor in found]
        raise CheckpointError(
            f"tensor {mapping.weight.megatron.replace('{layer}.', '')} is missing"
            + (f" (layer {mapping.layer})" if mapping.layer is not None else ""),
            where=str(self.folder),
            needed=f"all tensors of a {self.shape.family} model with {self.shape.num_layers} layers",
        )

    def _stored_names(self, mapping: TensorMapping) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """The possible stored names, each with the leading indices to take and the leading sizes to expect."""
        template = mapping.weight.megatron
        layer, layers = _index(mapping.layer, self.shape.num_layers)
        expert, experts = _index(mapping.expert, self.shape.num_experts)
        single = template.format(layer=mapping.layer)
        names = [(template.replace("{layer}.", ""), layer + expert, layers + experts), (single, expert, experts)]
        if expert:
            names.append((single.replace(".experts.experts.", f".experts.experts.{mapping.expert}."), (), ()))
        return names

    def _check_shape(self, mapping: TensorMapping, tensors: Sequence[GlobalTensor], counts: tuple[int, ...]) -> None:
        wanted = [*counts, *mapping.megatron_shape]
        if len(tensors) > 1:
            wanted[len(counts)] //= len(tensors)
        for tensor in tensors:
            if tensor.dtype != tensors[0].dtype:
                raise CheckpointError(f"{tensor.name} and {tensors[0].name} differ in dtype", where=str(self.folder))
            found = list(tensor.shape)
            if mapping.layout is Layout.VOCABULARY and found[0] > wanted[0]:
                self.padding_rows = max(self.padding_rows, found[0] - wanted[0])
                found[0] = wanted[0]
            if found != wanted:
                raise CheckpointError(
                    f"{tensor.name} has shape {list(tensor.shape)}",
                    where=str(self.folder),
                    needed=f"{wanted}, which follows from config.json",
                )

    def dtype(self, mapping: TensorMapping) -> torch.dtype:
        return self._parts[mapping][0][0].dtype

    def read(self, mapping: TensorMapping) -> list[LazyTensor]:
        """The Hugging Face tensors of a mapping."""
        parts = self._parts[mapping]
        rows = [shape[0] for shape in mapping.shapes]
        if mapping.layout is Layout.QKV:
            merged = read_rows(*parts[0], 0, sum(rows)).tensor()
            return [LazyTensor.of(part) for part in split_qkv(merged, self.shape.num_query_groups, rows)]
        if mapping.layout is Layout.GATED and len(parts) == 1:
            return [read_rows(*parts[0], 0, rows[0]), read_rows(*parts[0], rows[0], rows[1])]
        return [read_rows(tensor, leading, 0, count) for (tensor, leading), count in zip(parts, rows, strict=True)]

    def notes(self) -> list[str]:
        """What the reader leaves out, for the report."""
        notes = []
        if self.left_out:
            notes.append(f"{len(self.left_out)} optimizer and training states left out")
        if self.padding_rows:
            notes.append(f"{self.padding_rows} padding rows of the vocabulary removed")
        return notes


def _index(index: int | None, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return ((), ()) if index is None else ((index,), (count,))


def _check_common(folder: Path, shape: ModelShape) -> None:
    """Compare Megatron-LM's arguments, where the checkpoint has them, with the shape."""
    path = folder / COMMON_NAME
    if not path.is_file():
        raise CheckpointError(f"incomplete checkpoint: no {COMMON_NAME}", where=str(folder), action=OLDER)
    common = read_torch_save(path)
    if isinstance(common, dict) and isinstance(common.get("args"), argparse.Namespace):
        check_args(common["args"], shape, str(folder))
