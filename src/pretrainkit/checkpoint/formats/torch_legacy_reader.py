"""Reads Hugging Face tensors from Megatron-LM's classic checkpoints ("torch"), one at a time.

One file per model-parallel rank, `mp_rank_<TP>[_<PP>][_<EP>]/model_optim_rng.pt`, the second part with pipeline,
the third with expert parallelism. A file is `torch.save` of a dictionary with `model` (or `model0`, `model1`, ...
with interleaved stages), `args`, `checkpoint_version`, `iteration`, and optimizer and random states.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint.formats.megatron_lm import CHECKPOINT_VERSION, check_args
from pretrainkit.checkpoint.formats.torch_legacy_names import (
    FILE_NAME,
    TIED_OUTPUT,
    ExpertForm,
    LocalName,
    is_ignored,
    parse,
)
from pretrainkit.checkpoint.formats.torch_save import read_torch_save
from pretrainkit.checkpoint.lazy_tensor import LazyTensor, StoredTensor
from pretrainkit.checkpoint.mapping import TensorMapping
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.transforms import local_shape, unshard
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import CheckpointError
from pretrainkit.models.family import Layout

_RANK_FOLDER = re.compile(r"^mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?$")


@dataclass(frozen=True)
class _Rank:
    tensor: int
    pipeline: int
    expert: int


@dataclass(frozen=True)
class _Place:
    """A stored tensor of a rank, or one expert's part of a grouped one."""

    tensor: StoredTensor
    view: tuple[int, int, int] | None = None
    """Grouped experts: the shape [experts, in, out] that the tensor is a view of."""
    index: int = 0
    """Grouped experts: the index of this one."""

    def read(self) -> LazyTensor:
        """The Megatron tensor."""
        if self.view is None:
            return LazyTensor.of(self.tensor if self.tensor.is_contiguous else self.tensor.read())
        return LazyTensor.of(self.tensor.read().view(self.view)[self.index].T)


class TorchLegacyReader:
    """The weights of a classic checkpoint, as Hugging Face tensors. Optimizer states are not touched."""

    def __init__(self, folder: Path, mappings: Sequence[TensorMapping], shape: ModelShape) -> None:
        self.folder, self.shape = folder, shape
        self.padding_rows = 0
        self.left_out: set[str] = set()
        states = _read_states(folder)
        self.parallelism = _parallelism(states, folder)
        first = next(iter(states.values()))
        _check_version(first, folder)
        if isinstance(first.get("args"), argparse.Namespace):
            check_args(first["args"], shape, str(folder))
        self._places: dict[tuple[str, int | None, int | None], dict[int, _Place]] = {}
        self._tied_outputs: dict[int, _Place] = {}
        for state in states.values():
            self.left_out |= {key for key in state if key in ("optimizer", "opt_param_scheduler", "rng_state")}
        self._index(states)
        self._check(mappings)

    def _index(self, states: Mapping[_Rank, dict[str, Any]]) -> None:
        """Find the global layer and expert of every tensor."""
        chunks = max(len(_chunks(state)) for state in states.values())
        counts = {
            (chunk, rank.pipeline): _num_layers(_chunks(state)[chunk])
            for rank, state in states.items()
            for chunk in range(len(_chunks(state)))
            if rank.tensor == 0 and rank.expert == 0
        }
        firsts, total = {}, 0
        for chunk in range(chunks):
            for stage in range(self.parallelism.pipeline):
                firsts[chunk, stage] = total
                total += counts.get((chunk, stage), 0)
        if total != self.shape.num_layers:
            raise CheckpointError(
                f"{total} layers in the files of all pipeline stages",
                where=str(self.folder),
                needed=f"{self.shape.num_layers} layers by config.json",
            )
        for rank, state in states.items():
            for chunk, model in enumerate(_chunks(state)):
                for name, tensor in model.items():
                    if isinstance(tensor, StoredTensor) and not is_ignored(name):
                        self._add(name, tensor, rank, firsts[chunk, rank.pipeline])

    def _add(self, name: str, tensor: StoredTensor, rank: _Rank, first_layer: int) -> None:
        local = parse(name.removeprefix("module."), has_experts=bool(self.shape.num_experts))
        layer = None if local.layer is None else first_layer + local.layer
        if local.template == TIED_OUTPUT and self.shape.tie_word_embeddings:
            self._tied_outputs[rank.tensor] = _Place(tensor)
            return
        for expert, place in self._experts(local, tensor, rank):
            self._places.setdefault((local.template, layer, expert), {}).setdefault(rank.tensor, place)

    def _experts(self, local: LocalName, tensor: StoredTensor, rank: _Rank) -> list[tuple[int | None, _Place]]:
        if local.form is None:
            return [(None, _Place(tensor))]
        count = self.shape.num_experts // self.parallelism.expert
        first = rank.expert * count
        if local.form is ExpertForm.GROUPED:
            hidden = self.shape.hidden_size
            view = (count, hidden, -1) if "linear_fc1" in local.template else (count, -1, hidden)
            return [(first + i, _Place(tensor, view, i)) for i in range(count)]
        return [(first + (local.expert or 0), _Place(tensor))]

    def _check(self, mappings: Sequence[TensorMapping]) -> None:
        wanted = {_key(mapping): mapping for mapping in mappings}
        size = self.parallelism.tensor
        missing = [key for key in wanted if len(self._places.get(key, {})) != size]
        unknown = [key for key in self._places if key not in wanted]
        problems = [
            f"{len(keys)} tensors {what}: {', '.join(map(_describe, keys[:8]))}"
            for what, keys in (("missing", missing), ("that the architecture doesn't have", unknown))
            if keys
        ]
        if problems:
            raise CheckpointError(
                "; ".join(problems),
                where=str(self.folder),
                needed=f"all tensors of a {self.shape.family} model of the shape that config.json describes",
            )
        for key, mapping in wanted.items():
            self._check_shape(mapping, self._places[key])
        for rank, place in self._tied_outputs.items():
            embedding = self._places["embedding.word_embeddings.weight", None, None][rank]
            if not torch.equal(embedding.read().tensor(), place.read().tensor()):
                raise CheckpointError(
                    "the output layer differs from the embedding that it is tied to",
                    where=str(place.tensor.path),
                )

    def _check_shape(self, mapping: TensorMapping, places: Mapping[int, _Place]) -> None:
        size, rows = self.parallelism.tensor, mapping.megatron_shape[0]
        for place in places.values():
            if place.tensor.dtype != places[0].tensor.dtype:
                raise CheckpointError(
                    f"{_describe(_key(mapping))} has different dtypes on different ranks", where=str(self.folder)
                )
            found = place.read().shape
            padding = found[0] * size - rows if mapping.layout is Layout.VOCABULARY else 0
            self.padding_rows = max(self.padding_rows, padding)
            wanted = local_shape(mapping.layout, mapping.megatron_shape, size=size, padded_rows=rows + max(padding, 0))
            if found != wanted:
                raise CheckpointError(
                    f"{_describe(_key(mapping))} has shape {list(found)}",
                    where=str(place.tensor.path),
                    needed=f"{list(wanted)} at tensor parallel size {size}, which follows from config.json",
                )

    def dtype(self, mapping: TensorMapping) -> torch.dtype:
        return self._places[_key(mapping)][0].tensor.dtype

    def read(self, mapping: TensorMapping) -> list[LazyTensor]:
        """The Hugging Face tensors of a mapping."""
        places = self._places[_key(mapping)]
        parts = [places[rank].read() for rank in range(self.parallelism.tensor)]
        if mapping.layout is Layout.REPLICATED and any(
            not torch.equal(parts[0].tensor(), part.tensor()) for part in parts[1:]
        ):
            raise CheckpointError(
                f"{_describe(_key(mapping))} differs between tensor parallel ranks, which must hold the same",
                where=str(self.folder),
            )
        rows = [shape[0] for shape in mapping.shapes]
        return unshard(mapping.layout, parts, rows=rows, groups=self.shape.num_query_groups)

    def notes(self) -> list[str]:
        """What the reader leaves out, for the report."""
        notes = [f"left out: {', '.join(sorted(self.left_out))}"] if self.left_out else []
        if self.padding_rows:
            notes.append(f"{self.padding_rows} padding rows of the vocabulary removed")
        return notes


def _read_states(folder: Path) -> dict[_Rank, dict[str, Any]]:
    """Every rank's dictionary, tensors unread."""
    named: dict[tuple[int, ...], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK_FOLDER.match(path.name)
        if match:
            named[tuple(int(part) for part in match.groups() if part is not None)] = path / FILE_NAME
    lengths = {len(rank) for rank in named}
    if len(lengths) != 1:
        raise CheckpointError("rank folders of different kinds", where=str(folder), needed="mp_rank_XX[_YYY][_ZZZ]")
    for path in named.values():
        if not path.is_file():
            raise CheckpointError(
                f"incomplete checkpoint: {path.parent.name}/{FILE_NAME} is missing", where=str(folder)
            )
    states = {rank: read_torch_save(path) for rank, path in named.items()}
    for rank, state in states.items():
        if not isinstance(state, dict) or not ("model" in state or "model0" in state):
            raise CheckpointError("holds no model", where=str(named[rank]), needed="a Megatron-LM checkpoint")
        if any("language_model" in chunk for chunk in _chunks(state)):
            raise CheckpointError(
                "a checkpoint of Megatron-LM's old model classes",
                where=str(named[rank]),
                needed="a megatron-core model",
                action="convert it with Megatron-LM's tools/checkpoint/convert.py --saver core",
            )
    if lengths == {2} and _second_is_expert(states):
        return {_Rank(rank[0], 0, rank[1]): state for rank, state in states.items()}
    return {_Rank(*(*rank, 0, 0)[:3]): state for rank, state in states.items()}


def _second_is_expert(states: Mapping[tuple[int, ...], dict[str, Any]]) -> bool:
    """Whether `mp_rank_XX_YYY` means an expert rank: then every file holds the embedding."""
    return len(states) > 1 and all(
        any("embedding.word_embeddings.weight" in name for chunk in _chunks(state) for name in chunk)
        for state in states.values()
    )


def _parallelism(states: Mapping[_Rank, Any], folder: Path) -> Parallelism:
    sizes = Parallelism(
        tensor=max(rank.tensor for rank in states) + 1,
        pipeline=max(rank.pipeline for rank in states) + 1,
        expert=max(rank.expert for rank in states) + 1,
    )
    expected = sizes.tensor * sizes.pipeline * sizes.expert
    if len(states) != expected:
        raise CheckpointError(
            f"incomplete checkpoint: {len(states)} rank folders of {expected}"
            f" (TP {sizes.tensor}, PP {sizes.pipeline}, EP {sizes.expert})",
            where=str(folder),
        )
    return sizes


def _check_version(state: Mapping[str, Any], folder: Path) -> None:
    version = state.get("checkpoint_version", CHECKPOINT_VERSION)
    if not isinstance(version, (int, float)) or version < 2.0:
        raise CheckpointError(
            f"checkpoint version {version}, which orders query, key and value differently",
            where=str(folder),
            needed="2.0 or newer",
        )


def _chunks(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The model, or the models of interleaved stages."""
    if "model" in state:
        return [state["model"]]
    return [state[f"model{i}"] for i in range(len(state)) if f"model{i}" in state]


def _num_layers(model: Mapping[str, Any]) -> int:
    layers = {parse(name.removeprefix("module."), has_experts=False).layer for name in model}
    return len(layers - {None})


def _key(mapping: TensorMapping) -> tuple[str, int | None, int | None]:
    return mapping.weight.megatron, mapping.layer, mapping.expert


def _describe(key: tuple[str, int | None, int | None]) -> str:
    template, layer, expert = key
    return template.format(layer=layer) + ("" if expert is None else f" (expert {expert})")
