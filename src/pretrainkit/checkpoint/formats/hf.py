"""Reads and writes the weights of Hugging Face model folders: safetensors files with an index.

The safetensors package maps or loads entire files; here only the tensor in use is in memory, so that the memory of a
conversion stays flat. The format of a file, all little-endian:

| bytes | what |
|---|---|
| 0-7 | n, length of the header, u64 |
| 8 to 8+n | header, JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, optional "__metadata__" |
| 8+n on | the tensors' bytes, contiguous, row-major, in the order of their offsets, without gaps |
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES as DTYPES

from pretrainkit.checkpoint.formats import mxfp4
from pretrainkit.checkpoint.formats.hf_files import INDEX_NAME, SINGLE_NAME, other_files, weight_files
from pretrainkit.checkpoint.lazy_tensor import ComputedTensor, LazyTensor, StoredTensor, pwrite_all, same_bits
from pretrainkit.checkpoint.mapping import TensorMapping, check_names, check_tensors
from pretrainkit.checkpoint.plan import ConversionPlan
from pretrainkit.checkpoint.transforms import split_rows
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.files import read_json, write_json
from pretrainkit.models.multimodal import text_tensors, whole_name
from pretrainkit.models.registry import read_whole_config

_IGNORED_TENSORS = ("rotary_emb.inv_freq",)
"""Buffers that old transformers versions saved; they follow from config.json."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class HfReader:
    """The weights of a Hugging Face folder, read one at a time."""

    def __init__(self, folder: Path, mappings: Sequence[TensorMapping], *, tied: bool) -> None:
        self.run_state: dict[str, Any] = {}
        others = other_files(folder)
        self.notes = [f"left out: {', '.join(others)}"] if others else []
        tensors, carried = text_tensors(locate_tensors(folder))
        if carried:
            self.notes.append(f"{len(carried)} tensors of the rest of the model go along as they are")
        self.tensors = {name: location for name, location in tensors.items() if not name.endswith(_IGNORED_TENSORS)}
        extra_head = "lm_head.weight" if tied else None
        wanted = {name for mapping in mappings for name in self._stored_names(mapping)}
        self.tensors = _by_expert(self.tensors, wanted)
        check_names(wanted, self.tensors.keys() - {extra_head}, folder, RequestError)
        for mapping in mappings:
            names = self._stored_names(mapping)
            shapes = mapping.hf_shapes if names == mapping.hf else _quantized_shapes(*mapping.hf_shapes)
            check_tensors({name: self.tensors[name] for name in names}, shapes, folder, RequestError)
        self.dtypes = {
            mapping: self.tensors[mapping.hf[0]].dtype if mapping.hf[0] in self.tensors else torch.bfloat16
            for mapping in mappings
        }
        if extra_head in self.tensors:
            embedding = self.tensors["model.embed_tokens.weight"]
            if not same_bits(self.tensors[extra_head].read(), embedding.read()):
                raise RequestError(
                    f"{extra_head} differs from model.embed_tokens.weight, but config.json says tie_word_embeddings",
                    where=str(folder),
                    needed="equal weights, or tie_word_embeddings false",
                )

    def read(self, mapping: TensorMapping) -> list[LazyTensor]:
        """The parts of a mapping: its Hugging Face tensors, or what they are in one of them."""
        if mapping.weight.num_stacked:
            return self._of_expert(mapping)
        values = [LazyTensor.of(self.tensors[name].view(torch.atleast_1d)) for name in mapping.hf]
        if not mapping.weight.is_fused:
            return values
        rows = [rows for rows, *_ in mapping.shapes[: mapping.weight.num_fused]]
        return [*split_rows(values[0], 1, rows), *values[1:]]

    def _stored_names(self, mapping: TensorMapping) -> tuple[str, ...]:
        """Names of the tensors in the folder: those of the model, or what they are in MXFP4."""
        whole = mapping.hf[0]
        if mapping.weight.num_stacked and whole not in self.tensors and whole + mxfp4.BLOCKS in self.tensors:
            return whole + mxfp4.BLOCKS, whole + mxfp4.SCALES
        return mapping.hf

    def _of_expert(self, mapping: TensorMapping) -> list[LazyTensor]:
        """The rows of gate and up, or of down, of an expert's part of a tensor that all experts share."""
        names, count, weight = self._stored_names(mapping), len(mapping.shapes), mapping.weight
        num_rows = mapping.shapes[0][0]  # of each part

        def rows(name: str, part: int) -> StoredTensor:
            own = self.tensors[name].view(lambda whole: whole[mapping.expert])
            own = own.view(torch.Tensor.t) if weight.is_transposed and len(names) == 1 else own
            first = part * num_rows
            chosen = slice(part, None, count) if weight.is_alternating else slice(first, first + num_rows)
            return own.view(lambda matrix: matrix[chosen])

        parts = [[rows(name, part) for name in names] for part in range(count)]
        return [mxfp4.dequantized(*part) if len(part) > 1 else LazyTensor.of(*part) for part in parts]

    def padding(self, mapping: TensorMapping) -> LazyTensor | None:
        """None: the vocabulary of a Hugging Face model has no padding rows."""


def _by_expert(tensors: Mapping[str, StoredTensor], wanted: Collection[str]) -> dict[str, StoredTensor]:
    """The tensors with those of each expert where a folder has the experts of a layer as transformers 5 holds them.

    gate_up_proj is [experts, 2 x F, H], down_proj [experts, H, F].
    """
    found = dict(tensors)
    for name in found.keys() - set(wanted):
        block, _, kind = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
        if tensors[name].meta.dim() != 3 or not parts or f"{block}.experts.0.{parts[0]}.weight" not in wanted:
            continue
        stacked = found.pop(name)
        rows = stacked.shape[1] // len(parts)
        for expert, (number, part) in itertools.product(range(stacked.shape[0]), enumerate(parts)):
            own = stacked.narrow(0, expert, 1).narrow(1, number * rows, rows)
            found[f"{block}.experts.{expert}.{part}.weight"] = own.view(lambda matrix: matrix[0])
    return found


def locate_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder by name, from the files' own headers.

    Raises RequestError when the index and the headers disagree: a missing file, or a mapping that is in no file.
    """
    paths, index_path = weight_files(folder), folder / INDEX_NAME
    if not paths:
        raise RequestError(
            "no safetensors weights in it",
            where=str(folder),
            needed=f"{SINGLE_NAME} or {INDEX_NAME}",
            action="save the model with transformers' save_pretrained(..., safe_serialization=True)",
        )
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise RequestError(
            f"weight files missing: {', '.join(absent)}", where=str(folder), needed="all that the index lists"
        )
    listed: Mapping[str, str] = read_json(index_path)["weight_map"] if index_path.is_file() else {}
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        header = read_header(path)
        if twice := tensors.keys() & header.keys():
            raise RequestError(f"tensors in two files: {', '.join(sorted(twice)[:8])}", where=str(folder))
        tensors.update(header)
    found = {(name, tensor.path.name) for name, tensor in tensors.items()}
    if listed and (wrong := {name for name, _ in found ^ set(listed.items())}):
        raise RequestError(
            f"the index and the weight files disagree on {len(wrong)} tensors: {', '.join(sorted(wrong)[:8])}",
            where=str(index_path),
        )
    return tensors


class HfWriter:
    """Writes safetensors files, with an index where there are several, into a folder."""

    def __init__(self, folder: Path, plan: ConversionPlan) -> None:
        self.folder, self.dtypes, self._num_bytes, self._carried = folder, plan.dtypes, plan.num_bytes, plan.carried
        self._config = read_whole_config(plan.hf_folder)
        self.parts = plan.shards()
        """Tensors by file: one worker writes one file; another has those that are carried along."""
        count = len(self.parts) + bool(plan.carried)
        self._names = (
            [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        )

    def write_part(self, part: int, values: Iterable[tuple[TensorMapping, Sequence[LazyTensor]]]) -> None:
        """Write one file; `values` come in the order of `parts[part]`."""
        plan = {
            whole_name(name, self._config): described(shape, self.dtypes[mapping])
            for mapping in self.parts[part]
            for name, shape in zip(mapping.hf, mapping.hf_shapes, strict=True)
        }
        pieces = (piece for mapping, parts in values for piece in _as_stored(mapping, parts))
        write_safetensors(self.folder / self._names[part], plan, pieces)

    def finish(self) -> None:
        """Write the tensors that are carried along, and the index of several files."""
        files = zip(self._names, self.parts, strict=False)
        weight_map = {
            whole_name(tensor, self._config): name for name, part in files for mapping in part for tensor in mapping.hf
        }
        if self._carried:
            copy_tensors(self.folder / self._names[-1], self._carried)
            weight_map |= dict.fromkeys(self._carried, self._names[-1])
        if len(self._names) > 1:
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(self.folder / INDEX_NAME, index)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """All tensors of a file. Raises CheckpointError when it is truncated, has gaps or isn't safetensors."""
    try:
        with safe_open(path, framework="np"):
            pass  # it checks that the header describes every byte of the file once
    except SafetensorError as error:
        raise CheckpointError(
            f"not a complete safetensors file ({error})",
            where=str(path),
            action="the file is cut or damaged: fetch or write it again",
        ) from error
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    tensors = {}
    for name, info in header.items():
        if info["dtype"] not in DTYPES:
            raise CheckpointError(f"tensor {name} has dtype {info['dtype']}, which is not supported", where=str(path))
        meta = described(info["shape"], DTYPES[info["dtype"]])
        tensors[name] = StoredTensor(path, start + info["data_offsets"][0], meta)
    return tensors


def described(shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    """A row-major tensor without elements."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _quantized_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a tensor [experts, in, out] in MXFP4: the shapes of its blocks and scales."""
    experts, num_in, num_out = shape
    scales = (experts, num_out, num_in // mxfp4.BLOCK_VALUES)
    return (*scales, mxfp4.BLOCK_VALUES // 2), scales


def _as_stored(mapping: TensorMapping, parts: Sequence[LazyTensor]) -> Sequence[LazyTensor]:
    """The Hugging Face tensors of a mapping's parts, or the piece of one that all experts share."""
    if mapping.weight.is_fused:
        count = mapping.weight.num_fused
        return [LazyTensor.joined(parts[:count]), *parts[count:]]
    if not mapping.weight.num_stacked:
        return parts
    _, *shape = mapping.hf_shapes[0]

    def piece(_: int, __: int) -> torch.Tensor:
        tensors = [part.tensor() for part in parts]
        rows = torch.stack(tensors, 1).flatten(0, 1) if mapping.weight.is_alternating else torch.cat(tensors)
        return (rows.t() if mapping.weight.is_transposed else rows)[None]

    return [replace(parts[0], blocks=(ComputedTensor((1, *shape), parts[0].dtype, piece),))]


def write_safetensors(path: Path, plan: Mapping[str, torch.Tensor], pieces: Iterable[LazyTensor]) -> None:
    """Write and flush a file of tensors whose names, shapes and dtypes are given in advance.

    `pieces` are the tensors, in the order of `plan`, or rows of one after another.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in plan.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8, as the safetensors package does it
    with path.open("wb", buffering=0) as file:
        position = pwrite_all(file.fileno(), len(text).to_bytes(8, "little") + text, 0)
        left = iter(pieces)
        for tensor in plan.values():
            end = position + tensor.nbytes
            while True:
                piece = next(left)
                assert piece.shape[1:] == tensor.shape[1:] and piece.dtype == tensor.dtype, (tensor, piece.shape, piece)
                position += piece.write(file.fileno(), position)
                if position >= end:
                    break
            assert position == end, tensor
        assert next(left, None) is None
        os.fsync(file.fileno())


def copy_tensors(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Copy stored tensors into one file."""
    write_safetensors(path, {name: each.meta for name, each in tensors.items()}, map(LazyTensor.of, tensors.values()))


def open_by_package(folder: Path, stack: ExitStack) -> tuple[Callable[..., torch.Tensor], set[str]]:
    """A reader of a model's tensors by name, and their names, through the safetensors package, until `stack` closes.

    For checks: they must not read with the code that wrote. With a second argument, the row of that number is read.
    """
    files = {}
    for path in filter(Path.is_file, weight_files(folder)):  # missing files show up as missing names
        handle = stack.enter_context(safe_open(path, framework="pt"))
        files.update(dict.fromkeys(handle.keys(), handle))

    def read(name: str, row: int | None = None) -> torch.Tensor:
        tensor: torch.Tensor = files[name].get_tensor(name) if row is None else files[name].get_slice(name)[row]
        return tensor

    return read, set(files)
