"""The text of --dataset_path: the parts of a blend, with weights that may change, their names and their prefixes."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import NamedTuple

from pretrainkit.config.blend_schedule import parse_blend_schedule
from pretrainkit.config.schema import BlendChange
from pretrainkit.data.documents import documents_kind, short_name
from pretrainkit.data.indexed.blend import read_blend
from pretrainkit.data.indexed.format import bin_path, idx_path
from pretrainkit.data.indexed.pair_set import find_pairs
from pretrainkit.data.shards.urls import is_url, names_shards
from pretrainkit.errors import RequestError


class BlendPart(NamedTuple):
    """A part of --dataset_path."""

    weight: float | None
    """None: the dataset is this path alone."""
    path: str
    name: str = ""


def parse_blend(dataset_path: str) -> list[BlendPart]:
    """The parts of a blend; one without a weight when it is a single path."""
    if is_url(dataset_path):  # a pipe's command has words, too
        return [BlendPart(None, dataset_path)]
    plain = Path(dataset_path).expanduser()
    if plain.is_file() and plain.suffix not in (".bin", ".idx", ".tar"):
        return [BlendPart(entry.weight, entry.prefix, entry.name) for entry in read_blend(plain)]
    words = shlex.split(dataset_path)
    if plain.exists() or idx_path(plain).exists() or bin_path(plain).exists() or len(words) < 2:
        return [BlendPart(None, str(plain))]
    needed = "'weight prefix weight prefix ...', each weight above 0"
    if len(words) % 2:
        raise RequestError(f"{dataset_path!r}", needed=f"a prefix, a folder, or {needed}", where="--dataset_path")
    parts: list[BlendPart] = []
    for word, path in zip(words[::2], words[1::2], strict=True):
        try:
            weight = float(word)
        except ValueError:
            raise RequestError(f"{word!r} is not a weight", needed=needed, where="--dataset_path") from None
        if not math.isfinite(weight) or weight <= 0:
            raise RequestError(f"weight {word} of {path}", needed=needed, where="--dataset_path")
        parts.append(BlendPart(weight, path if is_url(path) else str(Path(path).expanduser())))
    return parts


def weighted_parts(weight: float | None, path: str) -> list[tuple[Path | str, float | None]]:
    """The prefixes at a path, with their parts of the path's weight, in proportion to their tokens."""
    kind = documents_kind(path)
    if names_shards(path):
        return [(path if is_url(path) else str(Path(path.removeprefix("file:")).absolute()), weight)]
    if kind:
        return [(Path(path).resolve(), weight)]
    prefixes = [prefix.resolve() for prefix in find_pairs(path)]
    if weight is None or len(prefixes) == 1:
        return [(prefix, weight) for prefix in prefixes]
    sizes = [bin_path(prefix).stat().st_size for prefix in prefixes]
    total = sum(sizes) or 1
    return [(prefix, weight * size / total) for prefix, size in zip(prefixes, sizes, strict=True)]


def part_names(blend: list[BlendPart], parts: list[tuple[Path | str, float | None, int]]) -> tuple[str, ...]:
    """The name of each prefix's part: what has a weight of its own, or without weights each prefix.

    It is the blend file's, or the end of the path, as long as it takes to tell it from others.
    """
    paths = [str(prefix) if blend[number].weight is None else blend[number].path for prefix, _, number in parts]
    return tuple(blend[number].name or short_name(path, paths) for path, (*_, number) in zip(paths, parts, strict=True))


def blend_changes(
    text: str | None, blend: list[BlendPart], parts: list[tuple[Path | str, float | None, int]]
) -> tuple[BlendChange, ...]:
    """The changes of weights, with each part's weight shared among its prefixes as that of the blend."""
    try:
        changes = parse_blend_schedule(text) if text else ()
    except ValueError:  # reported by the checks of the request
        return ()
    shares = [(number, (weight or 0.0) / (blend[number].weight or 1.0)) for _, weight, number in parts]
    for step, weights in changes:
        if blend[0].weight is None or len(weights) != len(blend):
            parts_found = "no weights" if blend[0].weight is None else f"{len(blend)} parts with weights"
            raise RequestError(
                f"{len(weights)} weights at step {step}, and --dataset_path has {parts_found}",
                needed="a weight for each part of 'weight prefix weight prefix ...' or of a blend file, in its order",
                where="--blend_schedule",
            )
    return tuple(
        BlendChange(step, tuple(weights[number] * share for number, share in shares)) for step, weights in changes
    )
