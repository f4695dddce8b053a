"""Adds tokens to a model while it is converted: rows of embedding and output layer, config.json, tokenizer files.

New ids follow the tokenizer's largest one, as the tokenizers package numbers them. So they first take rows of the
embedding that no token uses, where a model has some, and then new ones. All other rows stay what they are.
"""

from __future__ import annotations

import argparse
import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pretrainkit import hf_tokenizer
from pretrainkit.checkpoint.added_tokens import COPY, MEAN, PIECES, NewToken, raise_first
from pretrainkit.checkpoint.formats.hf_files import copy_description, readable_folder
from pretrainkit.checkpoint.lazy_tensor import SLICE_BYTES, LazyTensor
from pretrainkit.checkpoint.mapping import TensorMapping, tensor_mappings
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.files import read_json, write_json
from pretrainkit.models.family import Layout
from pretrainkit.models.multimodal import is_multimodal
from pretrainkit.models.registry import read_whole_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pretrainkit.checkpoint.open import WeightReader

ADD_TOKENS = "add_tokens"
"""Kind of step in the statement of an origin."""
_TOKENIZER_JSON, _SPECIAL_MAP, _ADDED_JSON = "tokenizer.json", "special_tokens_map.json", "added_tokens.json"
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True)
class Extension:
    """The tokens that a model gets, checked against its tokenizer and config.json."""

    source: Path
    """Hugging Face folder with config.json and tokenizer."""
    old_shape: ModelShape
    num_used_rows: int
    """Rows that tokens use so far: the first new id."""
    tokens: tuple[NewToken, ...]
    """In the order of their ids."""
    rows: tuple[tuple[int, ...], ...]
    """By token: the ids whose rows' mean its row begins as; empty for all ids so far."""

    @property
    def ids(self) -> range:
        """The new ids."""
        return range(self.num_used_rows, self.num_used_rows + len(self.tokens))

    @property
    def shape(self) -> ModelShape:
        """The model with the new rows."""
        return replace(self.old_shape, vocab_size=max(self.old_shape.vocab_size, self.ids.stop))

    @property
    def step(self) -> dict[str, Any]:
        """What a checkpoint states about it."""
        tokens = [
            {"token": token.text, "id": id, "special": token.special, "init": token.init}
            for token, id in zip(self.tokens, self.ids, strict=True)
        ]
        sizes = [self.old_shape.vocab_size, self.shape.vocab_size]
        return {"kind": ADD_TOKENS, "vocab_size": sizes, "tokens": tokens}

    @property
    def note(self) -> str:
        """What was added, in one sentence."""
        old, new = self.old_shape.vocab_size, self.shape.vocab_size
        inits = ", ".join(dict.fromkeys(token.init for token in self.tokens))
        unused = min(old, self.ids.stop) - self.ids.start
        taken = f", {unused} of them in rows that no token used" if unused > 0 else ""
        return (
            f"{len(self.tokens)} tokens added, ids {self.ids[0]} to {self.ids[-1]}{taken}; rows begin as: {inits}; "
            f"vocab_size {old} -> {new}"
        )

    @cached_property
    def hf_folder(self) -> Path:
        """A temporary folder, for the life of the process, with config.json and side files of the larger model.

        Raises RequestError unless the tokenizers package and the installed transformers give the new ids.
        """
        parent = Path(tempfile.mkdtemp(prefix="pretrainkit-vocabulary-"))
        atexit.register(shutil.rmtree, parent, ignore_errors=True)
        folder = parent / "hf"
        copy_description(self.source, folder)
        config = read_json(folder / "config.json")
        write_json(folder / "config.json", config | {"vocab_size": self.shape.vocab_size})
        self._write_tokenizer(folder)
        self._check_tokenizer(folder)
        return folder

    def _write_tokenizer(self, folder: Path) -> None:
        added = {
            id: {"content": token.text, **_FLAGS, "special": token.special}
            for token, id in zip(self.tokens, self.ids, strict=True)
        }
        special = [token.text for token in self.tokens if token.special]
        tokenizer = read_json(folder / _TOKENIZER_JSON)
        tokenizer["added_tokens"] = [
            *(tokenizer.get("added_tokens") or []),
            *({"id": id, **fields} for id, fields in added.items()),
        ]
        write_json(folder / _TOKENIZER_JSON, tokenizer)
        if (config := hf_tokenizer.read_config(folder)) is not None:
            if "added_tokens_decoder" in config:
                config["added_tokens_decoder"] |= {str(id): fields for id, fields in added.items()}
            write_json(folder / hf_tokenizer.CONFIG_NAME, _with_special(config, special))
        if (folder / _SPECIAL_MAP).is_file():
            write_json(folder / _SPECIAL_MAP, _with_special(read_json(folder / _SPECIAL_MAP), special))
        if (folder / _ADDED_JSON).is_file():
            ids = {token.text: id for token, id in zip(self.tokens, self.ids, strict=True)}
            write_json(folder / _ADDED_JSON, read_json(folder / _ADDED_JSON) | ids)

    def _check_tokenizer(self, folder: Path) -> None:
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer

        stated = Tokenizer.from_file(str(folder / _TOKENIZER_JSON))
        opened = AutoTokenizer.from_pretrained(readable_folder(folder), local_files_only=True, trust_remote_code=False)
        for token, id in zip(self.tokens, self.ids, strict=True):
            found = [
                stated.encode(token.text, add_special_tokens=False).ids,
                opened(token.text, add_special_tokens=False)["input_ids"],
            ]
            if found != [[id], [id]]:
                raise RequestError(
                    f"token {token.text!r} should have id {id}; tokenizers gives {found[0]}, "
                    f"{type(opened).__name__} of transformers {found[1]}",
                    where=str(self.source),
                    needed="a tokenizer that takes added tokens after its largest id",
                )


_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
"""An added token is found wherever its text is, as it is."""


def _with_special(fields: dict[str, Any], special: Sequence[str]) -> dict[str, Any]:
    """Fields of a tokenizer_config.json or special_tokens_map.json with further special tokens."""
    if not special:
        return fields
    name = next((name for name in _SPECIAL_LISTS if isinstance(fields.get(name), list)), _SPECIAL_LISTS[0])
    return fields | {name: [*(fields.get(name) or []), *special]}


def plan_extension(hf_folder: Path, shape: ModelShape, tokens: Sequence[NewToken]) -> Extension:
    """Check tokens against a model's tokenizer; nothing is written.

    Raises RequestError that names every token that it has already, and every initialisation that isn't possible.
    """
    from tokenizers import AddedToken, Tokenizer

    if is_multimodal(read_whole_config(hf_folder)):
        raise RequestError(
            "tokens for a multimodal model",
            where=str(hf_folder),
            needed="a text model: the rest of a multimodal one has ids of its own in the vocabulary",
        )
    path = hf_folder / _TOKENIZER_JSON
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises no class of its own
        raise RequestError(
            f"no tokenizer that can be read ({error})",
            where=str(path),
            needed=f"a complete {_TOKENIZER_JSON}",
            action="write one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        ) from error
    num_ids = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if num_ids > shape.vocab_size:
        raise RequestError(
            f"token id {num_ids - 1} is out of range for vocab_size {shape.vocab_size}", where=str(hf_folder)
        )
    present = {token.text: tokenizer.token_to_id(token.text) for token in tokens}
    if known := [f"{text!r} (id {id})" for text, id in present.items() if id is not None]:
        raise RequestError(
            f"{len(known)} of {len(tokens)} tokens are in its vocabulary already: {', '.join(known[:8])}",
            where=str(path),
            needed="new tokens",
            action="take them out of the file",
        )
    problems: list[RequestError] = []
    rows = []
    for token in tokens:
        with RequestError.collected(problems):
            rows.append(_rows_of(token, tokenizer, path))
    raise_first(problems)
    tokenizer.add_tokens([AddedToken(token.text, **_FLAGS, special=token.special) for token in tokens])
    ids = [tokenizer.token_to_id(token.text) for token in tokens]
    if ids != list(range(num_ids, num_ids + len(tokens))):
        raise RequestError(
            f"the tokenizers package would give ids {ids[:8]}, and the largest id so far is {num_ids - 1}",
            where=str(path),
            needed="a vocabulary without gaps",
        )
    return Extension(hf_folder, shape, num_ids, tuple(tokens), tuple(rows))


def _rows_of(token: NewToken, tokenizer: Tokenizer, where: Path) -> tuple[int, ...]:
    """The ids whose rows' mean a new row begins as; empty for all."""
    if token.init == MEAN:
        return ()
    if token.init == PIECES:
        encoded = tokenizer.encode(token.text, add_special_tokens=False)
        unknown = json.loads(tokenizer.to_str())["model"].get("unk_token")
        if encoded.ids and unknown not in encoded.tokens:
            return tuple(encoded.ids)
        raise RequestError(
            f"token {token.text!r} has pieces that the tokenizer doesn't know: {encoded.tokens}",
            where=str(where),
            action=f"initialise it with {MEAN} or {COPY}TOKEN",
        )
    copied = token.init.removeprefix(COPY)
    if (id := tokenizer.token_to_id(copied)) is None:
        raise RequestError(f"token {copied!r}, of which {token.text!r} should be a copy, isn't there", where=str(where))
    return (id,)


class ExtendedReader:
    """Reads a model with the rows of its new tokens."""

    def __init__(self, reader: WeightReader, extension: Extension) -> None:
        self._reader, self._extension = reader, extension
        old, new = tensor_mappings(extension.old_shape), tensor_mappings(extension.shape)
        self._old = dict(zip(new, old, strict=True))
        self.dtypes: Mapping[TensorMapping, torch.dtype] = {each: reader.dtypes[self._old[each]] for each in new}
        self.notes: list[str] = [*reader.notes, extension.note]
        self.run_state: dict[str, Any] = {**reader.run_state}
        if getattr(self.run_state.get("args"), "vocab_size", None):
            arguments = vars(self.run_state["args"]) | {"vocab_size": extension.shape.vocab_size}
            self.run_state["args"] = argparse.Namespace(**arguments)

    def padding(self, mapping: TensorMapping) -> LazyTensor | None:
        """Padding rows of the source's vocabulary."""
        return self._reader.padding(self._old[mapping])

    def read(self, mapping: TensorMapping) -> list[LazyTensor]:
        """The Hugging Face tensors of a mapping."""
        values = self._reader.read(self._old[mapping])
        if mapping.layout is not Layout.VOCABULARY:
            return values
        return [self._extended(value) for value in values]

    def _extended(self, old: LazyTensor) -> LazyTensor:
        ids = self._extension.ids
        means = {rows: _mean(old, rows or range(ids.start)) for rows in set(self._extension.rows)}
        added = torch.stack([means[rows] for rows in self._extension.rows])
        pieces = [old.rows(0, ids.start), LazyTensor.of(added.to(old.dtype))]
        if (left := old.shape[0] - ids.stop) > 0:
            pieces.append(old.rows(ids.stop, left))
        return LazyTensor.joined(pieces)


def _mean(rows: LazyTensor, ids: Sequence[int]) -> torch.Tensor:
    """The mean of some rows of a matrix in fp64."""
    if not isinstance(ids, range):
        return torch.cat([rows.rows(id, 1).tensor() for id in ids]).double().mean(0)
    step = max(1, SLICE_BYTES // (8 * rows.shape[1]))
    sums = (
        rows.rows(first, min(step, ids.stop - first)).tensor().double().sum(0) for first in range(0, ids.stop, step)
    )
    return sum(sums, torch.zeros(rows.shape[1], dtype=torch.float64)) / len(ids)
