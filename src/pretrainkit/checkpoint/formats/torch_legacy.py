"""Reads Hugging Face tensors from Megatron-LM's classic checkpoints ("torch"), one at a time.

One file per model-parallel rank, `mp_rank_<TP>[_<PP>][_<EP>]/model_optim_rng.pt`, the second part with pipeline,
the third with expert parallelism. A file is `torch.save` of a dictionary with `model` (or `model0`, `model1`, ...
with interleaved stages), `args`, `checkpoint_version`, `iteration`, and optimizer and random states.

A model is the `state_dict` of its rank. Its names differ from those of the weight tables in three ways: layers and
experts are numbered within the rank; the names of experts depend on the expert module; and without Transformer Engine
the norms are separate modules.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pretrainkit.checkpoint.formats.megatron_lm import CHECKPOINT_VERSION, check_args, run_state
from pretrainkit.checkpoint.formats.torch_save import read_torch_save
from pretrainkit.checkpoint.lazy_tensor import LazyTensor, StoredTensor, same_bits
from pretrainkit.checkpoint.mapping import TensorMapping, check_names, check_tensors
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.transforms import local_shape, unshard
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import CheckpointError
from pretrainkit.models.family import Layout

FILE_NAME = "model_optim_rng.pt"
TIED_OUTPUT = "output_layer.weight"
"""Name of the copy of a tied embedding on the last pipeline stage."""
EMBEDDING = "embedding.word_embeddings.weight"

Rank: TypeAlias = tuple[int, int, int]
"""Tensor, pipeline and expert parallel rank."""

_RANK_FOLDER = re.compile(r"^mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?$")
_LAYER = re.compile(r"^(?:module\.)?decoder\.layers\.(\d+)\.")
_NOT_WEIGHTS = ("_extra_state", "rotary_pos_emb.inv_freq")
_SEPARATE_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Norms that are modules of their own in the local layer implementation."""


def stored_names(template: str, layer: int | None, expert: int | None) -> list[str]:
    """The names that a tensor may have; `expert` is numbered within the rank. First comes Transformer Engine's.

    Those of experts are TEGroupedMLP's, SequentialMLP's, and GroupedMLP's, which has all of a rank in one tensor.
    """
    name = template.format(layer=layer)
    if expert is not None:
        experts, _, matrix = name.partition("experts.experts.")
        grouped = "weight1" if matrix == "linear_fc1.weight" else "weight2"
        return [
            f"{experts}experts.{tail}" for tail in (f"{matrix}{expert}", f"local_experts.{expert}.{matrix}", grouped)
        ]
    others = [name.replace(fused, norm) for fused, norm in _SEPARATE_NORMS.items() if name.endswith(fused)]
    return [name, *others]


class TorchLegacyReader:
    """The weights of a classic checkpoint, as Hugging Face tensors. Optimizer states are not touched."""

    def __init__(self, folder: Path, mappings: Sequence[TensorMapping], shape: ModelShape) -> None:
        self.folder, self.shape, self.notes = folder, shape, list[str]()
        states = _read_states(folder)
        self.parallelism = _parallelism(states, folder)
        first = next(iter(states.values()))
        _check_version(first, folder)
        check_args(first, shape, folder)
        self.run_state = run_state(first, folder)
        tensors = self._tensors(states)
        tied = tensors.pop(TIED_OUTPUT, {}) if shape.tie_word_embeddings else {}
        found = {mapping: self._find(mapping, tensors) for mapping in mappings}
        check_names({name or str(mapping) for mapping, (name, _) in found.items()}, tensors, folder)
        self._parts = {mapping: parts for mapping, (_, parts) in found.items()}
        self.dtypes = {mapping: parts[0].dtype for mapping, parts in self._parts.items()}
        for item in self._parts.items():
            self._check(*item)
        for (rank, expert), output in tied.items():
            if not same_bits(tensors[EMBEDDING][rank, expert].read(), output.read()):
                raise CheckpointError(
                    "the output layer differs from the embedding that it is tied to", where=str(output.path)
                )
        others = {"optimizer", "opt_param_scheduler", "rng_state"}
        if left_out := sorted(others & {key for state in states.values() for key in state}):
            self.notes.append(f"left out: {', '.join(left_out)}")

    def _tensors(self, states: Mapping[Rank, dict[str, Any]]) -> dict[str, dict[tuple[int, int], StoredTensor]]:
        """Tensors by name, with layers numbered in the model, and by tensor and expert parallel rank."""
        parts = range(max(len(_chunks(state)) for state in states.values())), range(self.parallelism.pipeline)
        first_layers, total = {}, 0
        for chunk, stage in itertools.product(*parts):
            first_layers[chunk, stage] = total
            total += _num_layers(_chunks(states[0, stage, 0])[chunk:])
        if total != self.shape.num_layers:
            raise CheckpointError(
                f"{total} layers in the files of all pipeline stages",
                where=str(self.folder),
                needed=f"{self.shape.num_layers} layers by config.json",
            )
        tensors: dict[str, dict[tuple[int, int], StoredTensor]] = {}
        for (rank, stage, expert), state in states.items():
            for chunk, model in enumerate(_chunks(state)):
                for local_name, tensor in model.items():
                    if isinstance(tensor, StoredTensor) and not any(part in local_name for part in _NOT_WEIGHTS):
                        name = _global_name(local_name, first_layers[chunk, stage])
                        tensors.setdefault(name, {}).setdefault((rank, expert), tensor)
        return tensors

    def _find(
        self, mapping: TensorMapping, tensors: Mapping[str, Mapping[tuple[int, int], StoredTensor]]
    ) -> tuple[str, list[StoredTensor]]:
        """The stored name of a Megatron tensor, and its parts by tensor parallel rank; empty where there is none."""
        sizes, expert_rank, expert = self.parallelism, 0, mapping.expert
        count = max(1, self.shape.num_experts // sizes.expert)
        if expert is not None:
            expert_rank, expert = divmod(expert, count)
        for name in stored_names(mapping.weight.megatron, mapping.layer, expert):
            if name not in tensors:
                continue
            parts = [tensors[name].get((rank, expert_rank)) for rank in range(sizes.tensor)]
            present = [part for part in parts if part is not None]
            if len(present) < len(parts):
                raise CheckpointError(
                    f"{name} is missing on tensor parallel rank {parts.index(None)}", where=str(self.folder)
                )
            if expert is not None and name.endswith(("experts.weight1", "experts.weight2")):
                present = [self._of_group(mapping, part, expert, count) for part in present]
            return name, present
        return "", []

    def _of_group(self, mapping: TensorMapping, group: StoredTensor, expert: int, count: int) -> StoredTensor:
        """One expert's matrix in a tensor of `count` experts, which is a view of [experts, in, out]."""
        shape = local_shape(mapping.layout, mapping.megatron_shape, size=self.parallelism.tensor, padded_rows=0)
        if group.meta.numel() != count * math.prod(shape):
            return group  # refused, as its shape is wrong
        return group.view(lambda tensor: tensor.view(count, shape[1], shape[0])[expert].T)

    def _check(self, mapping: TensorMapping, parts: Sequence[StoredTensor]) -> None:
        """Raise CheckpointError unless the parts form the tensor, which may have padding rows."""
        size, rows = len(parts), mapping.megatron_shape[0]
        padded_rows = max(rows, parts[0].shape[0] * size)
        shape = local_shape(mapping.layout, mapping.megatron_shape, size=size, padded_rows=padded_rows)
        named = {f"{mapping} of tensor parallel rank {rank}": part for rank, part in enumerate(parts)}
        check_tensors(named, [shape] * size, self.folder)

    def read(self, mapping: TensorMapping) -> list[LazyTensor]:
        """The Hugging Face tensors of a mapping."""
        parts = [LazyTensor.of(part) for part in self._parts[mapping]]
        if mapping.layout is Layout.REPLICATED and any(
            not same_bits(parts[0].tensor(), part.tensor()) for part in parts[1:]
        ):
            raise CheckpointError(
                f"{mapping} differs between tensor parallel ranks, which must hold the same", where=str(self.folder)
            )
        rows = [shape[0] for shape in mapping.shapes]
        return unshard(mapping.layout, parts, rows=rows, groups=mapping.weight.groups)

    def padding(self, mapping: TensorMapping) -> LazyTensor | None:
        """The padding rows of a vocabulary tensor; None where there are none."""
        whole = LazyTensor.joined(LazyTensor.of(part) for part in self._parts[mapping])
        rows = mapping.megatron_shape[0]
        if mapping.layout is not Layout.VOCABULARY or whole.shape[0] == rows:
            return None
        return whole.rows(rows, whole.shape[0] - rows)


def _read_states(folder: Path) -> dict[Rank, dict[str, Any]]:
    """Every rank's dictionary, tensors unread."""
    named: dict[tuple[int, ...], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        if match := _RANK_FOLDER.match(path.name):
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
        return {(rank[0], 0, rank[1]): state for rank, state in states.items()}
    padded = {rank + (0,) * (3 - len(rank)): state for rank, state in states.items()}
    return {(rank[0], rank[1], rank[2]): state for rank, state in padded.items()}


def _second_is_expert(states: Mapping[tuple[int, ...], dict[str, Any]]) -> bool:
    """Whether `mp_rank_XX_YYY` means an expert rank: then every file holds the embedding."""
    return len(states) > 1 and all(
        any(EMBEDDING in name for chunk in _chunks(state) for name in chunk) for state in states.values()
    )


def _parallelism(states: Iterable[Rank], folder: Path) -> Parallelism:
    ranks = list(states)
    sizes = Parallelism(*(max(numbers) + 1 for numbers in zip(*ranks, strict=True)))
    expected = sizes.tensor * sizes.pipeline * sizes.expert
    if len(ranks) != expected:
        raise CheckpointError(
            f"incomplete checkpoint: {len(ranks)} rank folders of {expected}"
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


def _num_layers(chunks: Sequence[Mapping[str, Any]]) -> int:
    """The number of layers of the first of some models; 0 without any."""
    return len({match[1] for name in (chunks[0] if chunks else ()) if (match := _LAYER.match(name))})


def _global_name(name: str, first_layer: int) -> str:
    """A name with its layer numbered in the model."""
    if match := _LAYER.match(name):
        return f"decoder.layers.{first_layer + int(match[1])}.{name[match.end() :]}"
    return name.removeprefix("module.")
