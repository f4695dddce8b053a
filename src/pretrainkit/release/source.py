"""What a release is compared with: one checkpoint, or the average of some that the release states.

The average is computed again, in numpy and in one piece, so that a fault in the code that wrote it can't hide here.
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

from pretrainkit.checkpoint.average import Average, Parent
from pretrainkit.checkpoint.convert import find_hf_folder
from pretrainkit.checkpoint.formats.hf_files import ORIGIN_NAME
from pretrainkit.checkpoint.lazy_tensor import LazyTensor
from pretrainkit.checkpoint.mapping import TensorMapping
from pretrainkit.checkpoint.merge import check_alike, name_of
from pretrainkit.checkpoint.open import DetectedCheckpoint, detect, open_reader
from pretrainkit.checkpoint.origin import AVERAGE, read_origin
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import CheckpointError, RequestError
from pretrainkit.models.registry import read_shape
from pretrainkit.release.report import Check


@dataclass(frozen=True)
class ReleaseSource:
    """What a release must be equal to."""

    found: DetectedCheckpoint
    """The checkpoint, or the average of its parents."""
    hf_folder: Path
    """config.json and side files."""
    shape: ModelShape

    def read_tensors(self, mappings: Sequence[TensorMapping]) -> Iterator[tuple[TensorMapping, list[Tensor]]]:
        """The Hugging Face tensors that the release must have, by mapping."""
        average = self.found.average
        if average is None:
            reader = open_reader(self.found, mappings, self.shape)
            for mapping in mappings:
                yield mapping, [value.tensor() for value in reader.read(mapping)]
            return
        readers = [open_reader(parent.checkpoint, mappings, self.shape) for parent in average.parents]
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
    found = None
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
    found = found or detect(paths[0])
    origin = find_hf_folder(found, hf_folder)
    return ReleaseSource(found, origin, read_shape(origin, ignore_fields=ignored))


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
    if not stated and not expected:
        return
    problems = []
    if stated != expected:
        problems.append(f"{ORIGIN_NAME} states {stated or 'nothing'}, the source is made in {expected or 'no steps'}")
    weights = [parent.weight for parent in source.found.average.parents] if source.found.average else []
    if weights and not (min(weights) > 0 and abs(sum(weights) - 1) < 1e-9):
        problems.append(f"weights {weights}, which aren't shares of 1")
    yield Check.of("it states what its weights were made of", problems, "; ".join(_in_words(source, stated)))


def _in_words(source: ReleaseSource, stated: Sequence[dict[str, Any]]) -> Iterator[str]:
    for step in stated:
        if step["kind"] == AVERAGE:
            parents = ", ".join(f"{parent['weight']:.6g} x {parent['name']}" for parent in step["parents"])
            again = "computed again from them" if source.found.average else "not computed again without its parents"
            yield f"average ({step['rule']}) of {parents}, {again}"
