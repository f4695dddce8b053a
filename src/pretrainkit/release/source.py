"""What a release is compared with: one checkpoint, or the average of some, with the tokens that the release states.

Averages and rows of new tokens are computed again, in numpy and in one piece, so that a fault in the code that wrote
them can't hide here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrainkit.checkpoint.added_tokens import NewToken
from pretrainkit.checkpoint.average import Average, Parent
from pretrainkit.checkpoint.convert import find_hf_folder
from pretrainkit.checkpoint.formats.hf_files import ORIGIN_NAME
from pretrainkit.checkpoint.lazy_tensor import LazyTensor
from pretrainkit.checkpoint.mapping import TensorMapping, tensor_mappings
from pretrainkit.checkpoint.merge import check_alike, name_of
from pretrainkit.checkpoint.open import DetectedCheckpoint, detect, open_reader
from pretrainkit.checkpoint.origin import AVERAGE, read_origin
from pretrainkit.checkpoint.vocabulary import ADD_TOKENS, Extension, plan_extension
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.models.family import Layout
from pretrainkit.models.registry import read_shape
from pretrainkit.release.report import Check


@dataclass(frozen=True)
class ReleaseSource:
    """What a release must be equal to."""

    found: DetectedCheckpoint
    """The checkpoint, or the average of its parents."""
    hf_folder: Path
    """config.json and side files, with the new tokens."""
    shape: ModelShape
    """With the rows of new tokens."""
    extension: Extension | None = None
    """The tokens that were added between the checkpoint and the release."""

    def read_tensors(self) -> Iterator[tuple[TensorMapping, list[Tensor]]]:
        """The Hugging Face tensors that the release must have, by mapping; see `wrong_rows` for rows of new tokens."""
        old_shape = self.extension.old_shape if self.extension else self.shape
        for mapping, (old, tensors) in zip(tensor_mappings(self.shape), self._read(old_shape), strict=True):
            if self.extension and old.layout is Layout.VOCABULARY:
                tensors = [_extended(tensor, self.extension) for tensor in tensors]
            yield mapping, tensors

    def _read(self, shape: ModelShape) -> Iterator[tuple[TensorMapping, list[Tensor]]]:
        """The tensors of the checkpoint, or of the average."""
        mappings, average = tensor_mappings(shape), self.found.average
        if average is None:
            reader = open_reader(self.found, mappings, shape)
            for mapping in mappings:
                yield mapping, [value.tensor() for value in reader.read(mapping)]
            return
        readers = [open_reader(parent.checkpoint, mappings, shape) for parent in average.parents]
        weights = [parent.weight for parent in average.parents]
        for mapping in mappings:
            dtype = readers[-1].dtypes[mapping]
            if average.dtype and not mapping.weight.keep_dtype:
                dtype = average.dtype
            values = zip(*(reader.read(mapping) for reader in readers), strict=True)
            yield mapping, [_averaged(parts, weights).to(dtype) for parts in values]


def _averaged(parts: Sequence[LazyTensor], weights: Sequence[float]) -> Tensor:
    """What `checkpoint.average` defines."""
    kind = np.float64 if parts[0].dtype is torch.float64 else np.float32
    wide = torch.float64 if kind is np.float64 else torch.float32
    total = None
    for part, weight in zip(parts, weights, strict=True):
        term = part.tensor().to(wide).numpy() * kind(weight)
        total = term if total is None else total + term
    return torch.from_numpy(total)


def _extended(old: Tensor, extension: Extension) -> Tensor:
    """A matrix with the rows of new tokens: the mean in fp64 of the rows that their initialisation names."""
    wide = old.double().numpy()
    rows = [wide[list(ids) if ids else slice(extension.ids.start)].mean(axis=0) for ids in extension.rows]
    new = torch.from_numpy(np.stack(rows)).to(old.dtype)
    return torch.cat([old[: extension.ids.start], new, old[extension.ids.stop :]])


def wrong_rows(tensor: Tensor, expected: Tensor, extension: Extension) -> list[str]:
    """The new tokens whose rows aren't what their initialisation says.

    A copy is exact. A mean may differ by its last digit: how an fp64 sum is rounded depends on its order.
    """
    wrong = []
    for token, id, ids in zip(extension.tokens, extension.ids, extension.rows, strict=True):
        wanted = expected[id].to(tensor.dtype).double()
        bound = torch.finfo(tensor.dtype).eps * wanted.abs() + 1e-12 if len(ids) != 1 else torch.zeros(())
        if not ((tensor[id].double() - wanted).abs() <= bound).all():
            wrong.append(f"{token.text!r} (row {id}, {token.init})")
    return wrong


def find_source(
    source: Path | Sequence[Path],
    released: Path,
    *,
    hf_folder: Path | None = None,
    ignore_config_fields: Iterable[str] = (),
) -> ReleaseSource:
    """What the source of a release is: the checkpoint given, or the average of the parents, or of a run, given.

    Raises RequestError unless it is one checkpoint, or exactly the parents that the release states.
    """
    paths, ignored = [source] if isinstance(source, Path) else list(source), tuple(ignore_config_fields)
    found, stated = None, list[dict[str, Any]]()
    with suppress(CheckpointError):  # `check_origin` reports it
        stated = read_origin(detect(released))
        if stated and stated[0]["kind"] == AVERAGE:
            found = _stated_average(stated[0], paths)
    if found and found.average:
        check_alike([parent.checkpoint for parent in found.average.parents], hf_folder, ignored)
    elif len(paths) > 1:
        raise RequestError(
            f"{len(paths)} sources for a release that states no average ({ORIGIN_NAME})",
            where=str(released),
            needed="the checkpoint that it was made from",
        )
    if found is None:
        try:
            found = detect(paths[0])
        except RequestError as error:
            if not stated or stated[0]["kind"] != AVERAGE:
                raise
            names = ", ".join(str(parent["name"]) for parent in stated[0]["parents"])
            raise RequestError(
                "neither a checkpoint nor the folder of all parents that the release states",
                where=str(paths[0]),
                needed=f"{names}, or the average of them that the release was made from",
            ) from error
    folder = find_hf_folder(found, hf_folder)
    shape = read_shape(folder, ignore_fields=ignored)
    further = stated[len(read_origin(found)) :]
    if further and further[0]["kind"] == ADD_TOKENS:
        extension = plan_extension(folder, shape, _stated_tokens(further[0]))
        return ReleaseSource(found, extension.hf_folder, extension.shape, extension)
    return ReleaseSource(found, folder, shape)


def _stated_tokens(step: dict[str, Any]) -> list[NewToken]:
    """The tokens that a release states."""
    try:
        return [NewToken(str(each["token"]), str(each["init"]), bool(each["special"])) for each in step["tokens"]]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"added tokens that can't be read ({error!r})", where=ORIGIN_NAME) from error


def _stated_average(step: dict[str, Any], paths: Sequence[Path]) -> DetectedCheckpoint | None:
    """The average that a release states, of the parents in `paths`; None where that is another checkpoint."""
    try:
        parents = step["parents"]
        names, weights = [str(parent["name"]) for parent in parents], [float(parent["weight"]) for parent in parents]
        dtype = getattr(torch, step["dtype"]) if step["dtype"] else None
        rule = str(step["rule"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"an average that can't be read ({error!r})", where=ORIGIN_NAME) from error
    if len(paths) == 1:
        folders = (paths[0], paths[0] / "checkpoints")
        inside = next((folder for folder in folders if all((folder / name).is_dir() for name in names)), None)
        if inside is None:
            return None
        found = [detect(inside / name) for name in names]
    else:
        found = _in_order([detect(path) for path in paths], names)
    whole = tuple(
        Parent(each, parent["name"], parent.get("step"), weight)
        for each, parent, weight in zip(found, parents, weights, strict=True)
    )
    return replace(found[-1], average=Average(whole, rule, dtype))


def _in_order(given: Sequence[DetectedCheckpoint], names: Sequence[str]) -> list[DetectedCheckpoint]:
    """The given parents in the order of the stated names; parents of one name stay in the order given."""
    left, found = list(given), []
    for name in names:
        match = next((each for each in left if name_of(each) == name), None)
        if match is None:
            break
        left.remove(match)
        found.append(match)
    if left or len(found) < len(names):
        raise RequestError(
            f"sources {', '.join(name_of(each) for each in given)}",
            needed=f"the parents that the release states: {', '.join(names)}",
        )
    return found


def check_origin(source: ReleaseSource, released: Path) -> Iterator[Check]:
    """Whether a release states the steps that its source was made in; no check where there are none."""
    stated, expected = read_origin(detect(released)), read_origin(source.found)
    if source.extension:
        expected = [*expected, source.extension.step]
    if not stated and not expected:
        return
    problems = []
    if stated != expected:
        made, says = (list(map(_in_words, steps)) or ["nothing"] for steps in (expected, stated))
        problems.append(f"{ORIGIN_NAME} states: {', '.join(says)}; the source is made of: {', '.join(made)}")
    weights = [parent.weight for parent in source.found.average.parents] if source.found.average else []
    if weights and not (min(weights) > 0 and abs(sum(weights) - 1) < 1e-9):
        problems.append(f"weights {weights}, which aren't shares of 1")
    compared = [AVERAGE] * bool(source.found.average) + [ADD_TOKENS] * bool(source.extension)
    fine = [
        f"{_in_words(step)} ({'computed again' if step['kind'] in compared else 'stated by the source too'})"
        for step in stated
    ]
    yield Check.of("it states what its weights were made of", problems, "; ".join(fine))


def _in_words(step: dict[str, Any]) -> str:
    """A step, for people."""
    with suppress(KeyError, TypeError, ValueError, IndexError):
        if step["kind"] == AVERAGE:
            parents = ", ".join(f"{parent['weight']:.6g} x {parent['name']}" for parent in step["parents"])
            return f"average in fp32 ({step['rule']}): {parents}"
        if step["kind"] == ADD_TOKENS:
            tokens = step["tokens"]
            return f"{len(tokens)} tokens added, ids {tokens[0]['id']} to {tokens[-1]['id']}"
    return str(step)
