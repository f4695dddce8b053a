"""Reads and writes the weights of Hugging Face model folders: safetensors files with an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from pretrainkit.checkpoint.formats.safetensors import SafetensorsWriter, TensorPlan, read_header
from pretrainkit.checkpoint.formats.weight_files import INDEX_NAME, SINGLE_NAME, weight_files
from pretrainkit.checkpoint.lazy_tensor import LazyTensor, StoredTensor
from pretrainkit.checkpoint.mapping import TensorMapping, check_names
from pretrainkit.checkpoint.plan import ConversionPlan
from pretrainkit.errors import RequestError
from pretrainkit.files import read_json, write_json

_IGNORED_TENSORS = ("rotary_emb.inv_freq",)
"""Buffers that old transformers versions saved; they follow from config.json."""


class HfReader:
    """The weights of a Hugging Face folder, read one at a time."""

    def __init__(self, folder: Path, mappings: Sequence[TensorMapping], *, tied: bool) -> None:
        self.folder = folder
        self.tensors = {
            name: location for name, location in locate_tensors(folder).items() if not name.endswith(_IGNORED_TENSORS)
        }
        extra_head = "lm_head.weight" if tied else None
        check_names(mappings, (name for name in self.tensors if name != extra_head), str(folder))
        for mapping in mappings:
            dtypes = {self.tensors[name].dtype for name in mapping.hf}
            if len(dtypes) > 1:
                raise RequestError(
                    f"{mapping} have different dtypes: {', '.join(sorted(map(str, dtypes)))}",
                    where=str(folder),
                    needed="one dtype, since Megatron keeps them in one tensor",
                )
            for name, shape in zip(mapping.hf, mapping.shapes, strict=True):
                if self.tensors[name].shape != shape:
                    raise RequestError(
                        f"tensor {name} has shape {list(self.tensors[name].shape)}",
                        where=str(self.tensors[name].path),
                        needed=f"{list(shape)}, which follows from config.json",
                    )
        if extra_head in self.tensors:
            self._check_tied(extra_head)

    def _check_tied(self, name: str) -> None:
        if not torch.equal(self.tensors[name].read(), self.tensors["model.embed_tokens.weight"].read()):
            raise RequestError(
                f"{name} differs from model.embed_tokens.weight, but config.json says tie_word_embeddings",
                where=str(self.folder),
                needed="equal weights, or tie_word_embeddings false",
            )

    def dtype(self, mapping: TensorMapping) -> torch.dtype:
        return self.tensors[mapping.hf[0]].dtype

    def read(self, mapping: TensorMapping) -> list[LazyTensor]:
        """The Hugging Face tensors of a mapping."""
        return [LazyTensor.of(self.tensors[name]) for name in mapping.hf]

    def notes(self) -> list[str]:
        return []


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
        twice = tensors.keys() & header.keys()
        if twice:
            raise RequestError(f"tensors in two files: {', '.join(sorted(twice)[:8])}", where=str(folder))
        tensors.update(header)
    wrong = [name for name, file in listed.items() if name not in tensors or tensors[name].path.name != file]
    wrong += [name for name in tensors if listed and name not in listed]
    if wrong:
        raise RequestError(
            f"the index and the weight files disagree on {len(wrong)} tensors: {', '.join(sorted(wrong)[:8])}",
            where=str(index_path),
        )
    return tensors


class HfWriter:
    """Writes safetensors files, with an index where there are several, into a folder."""

    def __init__(self, folder: Path, plan: ConversionPlan) -> None:
        self.folder, self.dtypes = folder, plan.dtypes
        self.parts = plan.shards()
        """Tensors by file: one worker writes one file."""
        count = len(self.parts)
        self._names = (
            [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        )

    def write_part(self, part: int, values: Iterable[tuple[TensorMapping, Sequence[LazyTensor]]]) -> None:
        """Write one file; `values` come in the order of `parts[part]`."""
        plan = [tensor for mapping in self.parts[part] for tensor in _plan(mapping, self.dtypes[mapping])]
        with (self.folder / self._names[part]).open("wb", buffering=0) as file:
            writer = SafetensorsWriter(file.fileno(), plan)
            for _, tensors_hf in values:
                for value in tensors_hf:
                    writer.write(value)
            writer.finish()

    def finish(self) -> None:
        """Write the index from the headers that are on disk."""
        if len(self._names) == 1:
            return
        headers = {name: read_header(self.folder / name) for name in self._names}
        total = sum(location.num_bytes for header in headers.values() for location in header.values())
        weight_map = {tensor: name for name, header in headers.items() for tensor in header}
        write_json(
            self.folder / INDEX_NAME,
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        )


def _plan(mapping: TensorMapping, dtype: torch.dtype) -> list[TensorPlan]:
    return [TensorPlan(name, shape, dtype) for name, shape in zip(mapping.hf, mapping.shapes, strict=True)]
