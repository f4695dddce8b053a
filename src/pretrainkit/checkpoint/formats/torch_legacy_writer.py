"""Writes Megatron-LM's classic checkpoints (see `torch_legacy` for the format), one tensor at a time.

The model of a rank is never in memory: `torch.save` first writes each file with space reserved for its tensors
(torch.serialization.skip_data), then one or more workers write the tensors into it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint.formats.torch_legacy import EMBEDDING, FILE_NAME, TIED_OUTPUT, Rank, stored_names
from pretrainkit.checkpoint.formats.torch_save import read_torch_save, write_torch_save
from pretrainkit.checkpoint.lazy_tensor import LazyTensor, StoredTensor
from pretrainkit.checkpoint.mapping import TensorMapping
from pretrainkit.checkpoint.plan import ConversionPlan
from pretrainkit.checkpoint.transforms import local_shape, shard


class TorchLegacyWriter:
    """Writes the files of all ranks of a classic checkpoint into an empty folder."""

    def __init__(self, folder: Path, plan: ConversionPlan, common: Mapping[str, Any]) -> None:
        self.folder, self.dtypes, self.shape = folder, plan.dtypes, plan.shape
        self.parallelism, self._padded_rows = plan.options.parallelism, plan.padded_vocab_size
        self._grouped_experts = plan.grouped_experts
        self._stages = plan.options.parallelism.stages(plan.shape.num_layers)
        self.parts = plan.parts()
        """Tensors by worker; every worker writes into all files."""
        sizes = self.parallelism
        ranks = itertools.product(range(sizes.tensor), range(sizes.pipeline), range(sizes.expert))
        self._places = {rank: self._reserve(rank, plan.mappings, common) for rank in ranks}

    def _path(self, rank: Rank) -> Path:
        name = f"mp_rank_{rank[0]:02d}"
        if self.parallelism.pipeline > 1:
            name += f"_{rank[1]:03d}"
        if self.parallelism.expert > 1:
            name += f"_{rank[2]:03d}"
        return self.folder / name / FILE_NAME

    def _names(self, mapping: TensorMapping, stage: int, expert_rank: int) -> list[str]:
        """The names of a tensor on a rank: none, one, or two for a tied embedding that is also the output layer."""
        last, expert, layers = self.parallelism.pipeline - 1, mapping.expert, self._stages[stage]
        if mapping.layer is not None:
            if expert is not None:
                rank, expert = divmod(expert, self.shape.num_experts // self.parallelism.expert)
                if rank != expert_rank:
                    return []
            if mapping.layer not in layers:
                return []
            names = stored_names(mapping.weight.megatron, mapping.layer - layers.start, expert)
            return [names[0 if expert is None or self._grouped_experts else 1]]
        if mapping.weight.megatron != EMBEDDING:
            return [mapping.weight.megatron] if stage == last else []
        is_tied_output = self.shape.tie_word_embeddings and stage == last > 0
        return [EMBEDDING] * (stage == 0) + [TIED_OUTPUT] * is_tied_output

    def _reserve(
        self, rank: Rank, mappings: Sequence[TensorMapping], common: Mapping[str, Any]
    ) -> dict[str, StoredTensor]:
        """Write a rank's file without the bytes of its tensors; the location of each tensor."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        model: dict[str, Any] = {}
        sizes = {"size": self.parallelism.tensor, "padded_rows": self._padded_rows}
        with FakeTensorMode():
            for mapping in mappings:
                shape = local_shape(mapping.layout, mapping.megatron_shape, **sizes)
                for name in self._names(mapping, rank[1], rank[2]):
                    model[name] = torch.empty(shape, dtype=self.dtypes[mapping])
                    model.update(_extra_states(name))
        path = self._path(rank)
        path.parent.mkdir(parents=True)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            write_torch_save({**common, "model": model}, path)
        return {name: tensor for name, tensor in read_torch_save(path)["model"].items() if tensor is not None}

    def write_part(self, part: int, values: Iterable[tuple[TensorMapping, Sequence[LazyTensor]]]) -> None:
        """Write some tensors into the files of all ranks that hold them."""
        sizes = self.parallelism
        for mapping, tensors_hf in values:
            for rank in range(sizes.tensor):
                local = shard(
                    mapping.layout,
                    tensors_hf,
                    rank=rank,
                    size=sizes.tensor,
                    groups=mapping.weight.groups,
                    padded_rows=self._padded_rows,
                )
                for stage, expert in itertools.product(range(sizes.pipeline), range(sizes.expert)):
                    for name in self._names(mapping, stage, expert):
                        _put(self._places[rank, stage, expert][name], local)

    def finish(self) -> None:
        """Nothing is left to be written."""


def _extra_states(name: str) -> dict[str, None]:
    """The empty extra states that Transformer Engine's modules expect with a weight."""
    module, _, parameter = name.rpartition(".")
    if not parameter.startswith("weight") or "linear_" not in module:
        return {}
    states: dict[str, None] = {f"{module}._extra_state": None}
    if module.endswith("self_attention.linear_proj"):
        states[module.replace("linear_proj", "core_attention._extra_state")] = None
    return states


def _put(place: StoredTensor, value: LazyTensor) -> None:
    """Write a tensor to its location."""
    assert value.shape == place.shape and value.dtype == place.dtype, (value.shape, place)
    with place.path.open("r+b", buffering=0) as file:
        value.write(file.fileno(), place.begin)
