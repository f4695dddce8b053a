"""Hugging Face model folders as source and target of a conversion: weights in safetensors, and side files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pretrainkit.checkpoint.formats.safetensors import SafetensorsWriter, TensorPlan, read_header
from pretrainkit.checkpoint.formats.torch_save import StoredTensor
from pretrainkit.checkpoint.formats.weight_files import INDEX_NAME, SINGLE_NAME, weight_files
from pretrainkit.checkpoint.lazy_tensor import Rows
from pretrainkit.checkpoint.mapping import Entry, check_names
from pretrainkit.errors import RequestError
from pretrainkit.files import read_json, write_json

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_SIDE_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py", ".md", ".vocab", ".bpe")
_NEVER_COPIED = {"config.json", INDEX_NAME, "pytorch_model.bin.index.json", "trainer_state.json", "training_args.bin"}
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_IGNORED_TENSORS = ("rotary_emb.inv_freq",)
"""Buffers that old transformers versions saved; they follow from config.json."""


class HfSource:
    """The weights of a Hugging Face folder, read one at a time."""

    kind = "hf"

    def __init__(self, folder: Path, entries: Sequence[Entry], *, tied: bool) -> None:
        self.folder = folder
        self.tensors = {
            name: location for name, location in locate_tensors(folder).items() if not name.endswith(_IGNORED_TENSORS)
        }
        extra_head = "lm_head.weight" if tied else None
        check_names(entries, (name for name in self.tensors if name != extra_head), str(folder))
        for entry in entries:
            dtypes = {self.tensors[name].dtype for name in entry.hf}
            if len(dtypes) > 1:
                raise RequestError(
                    f"{entry} have different dtypes: {', '.join(sorted(map(str, dtypes)))}",
                    where=str(folder),
                    needed="one dtype, since Megatron keeps them in one tensor",
                )
            for name, shape in zip(entry.hf, entry.shapes, strict=True):
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

    def dtype(self, entry: Entry) -> torch.dtype:
        return self.tensors[entry.hf[0]].dtype

    def read(self, entry: Entry) -> list[Rows]:
        """The Hugging Face tensors of an entry."""
        return [Rows.of(self.tensors[name]) for name in entry.hf]

    def notes(self) -> list[str]:
        return []


def locate_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder by name, from the files' own headers.

    Raises RequestError when the index and the headers disagree: a missing file, or an entry that is in no file.
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


class HfTarget:
    """Writes sharded safetensors with an index, config.json and side files into an empty folder."""

    kind = "hf"

    def __init__(
        self,
        folder: Path,
        entries: Sequence[Entry],
        dtypes: Mapping[Entry, torch.dtype],
        *,
        max_shard_bytes: int,
    ) -> None:
        self.folder, self.dtypes = folder, dtypes
        self.parts = _shards(entries, dtypes, max_shard_bytes)
        """Entries by file: one worker writes one file."""
        count = len(self.parts)
        self._names = (
            [SINGLE_NAME] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        )

    def write_part(self, part: int, values: Iterable[tuple[Entry, Sequence[Rows]]]) -> None:
        """Write one file; `values` come in the order of `parts[part]`."""
        plan = [tensor for entry in self.parts[part] for tensor in _plan(entry, self.dtypes[entry])]
        with (self.folder / self._names[part]).open("wb", buffering=0) as file:
            writer = SafetensorsWriter(file.fileno(), plan)
            for _, of_entry in values:
                for value in of_entry:
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


def _plan(entry: Entry, dtype: torch.dtype) -> list[TensorPlan]:
    return [TensorPlan(name, shape, dtype) for name, shape in zip(entry.hf, entry.shapes, strict=True)]


def _shards(entries: Sequence[Entry], dtypes: Mapping[Entry, torch.dtype], max_shard_bytes: int) -> list[list[Entry]]:
    """Entries by file, filled in order up to the limit; an entry larger than the limit has its own file."""
    shards: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        size = entry.numel * dtypes[entry].itemsize
        if shards[-1] and used + size > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += size
    return shards


def is_weight_file(path: Path) -> bool:
    """Whether a file of a model folder holds weights, in whatever format.

    `tokenizer.model` is one where transformers made the folder from a GGUF file: it saves the whole GGUF as that.
    """
    if not path.is_file():
        return False
    if path.name == "tokenizer.model":
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    return path.name.endswith(_WEIGHT_SUFFIXES) and not path.name.startswith("tokenizer")


def side_files(folder: Path) -> list[Path]:
    """The files of a model folder that go along with its weights: tokenizer, chat template, generation config, ..."""
    found = []
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name in _NEVER_COPIED or path.name.startswith("."):
            continue
        if is_weight_file(path):
            continue
        if path.suffix in _SIDE_SUFFIXES or path.name.startswith(_LICENCES):
            found.append(path)
    return found


def copy_side_files(source: Path, target: Path) -> list[str]:
    """Copy a model folder's side files byte for byte; the names copied."""
    names = []
    for path in side_files(source):
        shutil.copyfile(path, target / path.name)
        names.append(path.name)
    return names


def release_config(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The source's config.json with what the conversion changed, and nothing else: the dtype, and no local path."""
    released = {
        key: value
        for key, value in config.items()
        if not (key == "_name_or_path" and (str(value).startswith(("/", ".", "~")) or Path(str(value)).exists()))
    }
    key = "dtype" if "dtype" in config else "torch_dtype"
    released[key] = str(dtype).removeprefix("torch.")
    return released


def write_config(target: Path, config: Mapping[str, Any]) -> None:
    """Write config.json as transformers does: two spaces, keys sorted, a newline at the end."""
    (target / "config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )
