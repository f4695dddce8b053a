"""Reads and writes the weights of Hugging Face model folders: safetensors files with an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from pretrainkit.checkpoint.formats.hf_files import INDEX_NAME, SINGLE_NAME, weight_files
from pretrainkit.checkpoint.formats.safetensors import described, read_header, write_safetensors
from pretrainkit.checkpoint.lazy_tensor import LazyTensor, StoredTensor
from pretrainkit.checkpoint.mapping import TensorMapping, check_names, check_tensors
from pretrainkit.checkpoint.plan import ConversionPlan
from pretrainkit.errors import RequestError
from pretrainkit.files import read_json, write_json

_IGNORED_TENSORS = ("rotary_emb.inv_freq",)
"""Buffers that old transformers versions saved; they follow from config.json."""


class HfReader:
    """The weights of a Hugging Face folder, read one at a time."""

    def __init__(self, folder: Path, mappings: Sequence[TensorMapping], *, tied: bool) -> None:
        self.notes = list[str]()
        self.tensors = {
            name: location for name, location in locate_tensors(folder).items() if not name.endswith(_IGNORED_TENSORS)
        }
        extra_head = "lm_head.weight" if tied else None
        wanted = {name for mapping in mappings for name in mapping.hf}
        check_names(wanted, self.tensors.keys() - {extra_head}, folder, RequestError)
        for mapping in mappings:
            check_tensors({name: self.tensors[name] for name in mapping.hf}, mapping.shapes, folder, RequestError)
        self.dtypes = {mapping: self.tensors[mapping.hf[0]].dtype for mapping in mappings}
        if extra_head in self.tensors:
            embedding = self.tensors["model.embed_tokens.weight"]
            if not torch.equal(self.tensors[extra_head].read(), embedding.read()):
                raise RequestError(
                    f"{extra_head} differs from model.embed_tokens.weight, but config.json says tie_word_embeddings",
                    where=str(folder),
                    needed="equal weights, or tie_word_embeddings false",
                )

    def read(self, mapping: TensorMapping) -> list[LazyTensor]:
        """The Hugging Face tensors of a mapping."""
        return [LazyTensor.of(self.tensors[name]) for name in mapping.hf]


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
        self.folder, self.dtypes, self._num_bytes = folder, plan.dtypes, plan.num_bytes
        self.parts = plan.shards()
        """Tensors by file: one worker writes one file."""
        count = len(self.parts)
        self._names = (
            [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        )

    def write_part(self, part: int, values: Iterable[tuple[TensorMapping, Sequence[LazyTensor]]]) -> None:
        """Write one file; `values` come in the order of `parts[part]`."""
        plan = {
            name: described(shape, self.dtypes[mapping])
            for mapping in self.parts[part]
            for name, shape in zip(mapping.hf, mapping.shapes, strict=True)
        }
        write_safetensors(self.folder / self._names[part], plan, (value for _, rows in values for value in rows))

    def finish(self) -> None:
        """Write the index of several files."""
        files = zip(self._names, self.parts, strict=True)
        weight_map = {tensor: name for name, part in files for mapping in part for tensor in mapping.hf}
        if len(self._names) > 1:
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(self.folder / INDEX_NAME, index)
