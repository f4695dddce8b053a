"""A mixture of prepared datasets: names, weights and token counts, in one file.

    {"format": "pretrainkit-blend-1",
     "datasets": [{"name": "ja", "prefix": "/data/ja_text_document", "weight": 0.7, "num_tokens": 123}]}

Weights are shares of the samples and sum to 1. A prefix that is not absolute counts from the file's folder.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pretrainkit.data.indexed.format import open_pair
from pretrainkit.data.indexed.pair_set import find_pairs
from pretrainkit.errors import RequestError
from pretrainkit.files import read_json, write_json

FORMAT = "pretrainkit-blend-1"


@dataclass(frozen=True)
class BlendEntry:
    """One dataset of a mixture."""

    name: str
    prefix: str
    weight: float
    num_tokens: int

    def epochs_of(self, total_tokens: float) -> float:
        """How often this dataset is passed through when `total_tokens` of the mixture are read."""
        return self.weight * total_tokens / self.num_tokens


def make_blend(parts: list[str], temperature: float = 1.0) -> list[BlendEntry]:
    """A mixture of `PREFIX`, `NAME=PREFIX` or `NAME=PREFIX:WEIGHT`; a folder means all of its pairs.

    Without any weights, shares are in proportion to tokens^(1 / temperature): 1 mixes everything as it is, more
    lifts small datasets. Raises RequestError for weights that are not positive, given to some only, datasets
    without a token, or one meant twice.
    """
    if not temperature > 0 or not math.isfinite(temperature):
        raise RequestError(f"{temperature}", where="--temperature", needed="a number above 0")
    found: list[tuple[str, Path, float | None]] = []
    counts: list[int] = []
    for part in parts:
        name, path, weight = _split_part(part)
        pairs = {prefix: open_pair(prefix).num_tokens for prefix in find_pairs(path)}
        for prefix, count in pairs.items():
            below = str(prefix.relative_to(path)) if Path(path) in prefix.parents else prefix.name
            label = name if name and len(pairs) == 1 else f"{name}/{below}" if name else below
            share = None if weight is None else weight * count / max(sum(pairs.values()), 1)
            found.append((label, prefix.resolve(), share))
            counts.append(count)
    _check(found)
    empty = [str(prefix) for (_, prefix, _), count in zip(found, counts, strict=True) if not count]
    if empty:
        raise RequestError(f"no token in {', '.join(empty)}", action="leave it out of the mixture")
    lifted = (count ** (1 / temperature) for count in counts)
    weights = [other if share is None else share for (_, _, share), other in zip(found, lifted, strict=True)]
    return [
        BlendEntry(name, str(prefix), weight / sum(weights), count)
        for (name, prefix, _), weight, count in zip(found, weights, counts, strict=True)
    ]


def _split_part(part: str) -> tuple[str, str, float | None]:
    name, _, rest = part.rpartition("=")
    path, _, weight_text = rest.rpartition(":")
    if not path:
        return name, rest, None
    try:
        weight = float(weight_text)
    except ValueError:
        return name, rest, None  # the colon belongs to the path
    if not math.isfinite(weight) or weight <= 0:
        raise RequestError(f"weight {weight_text} of {path}", needed="a number above 0")
    return name, path, weight


def _check(found: list[tuple[str, Path, float | None]]) -> None:
    for what, values in (
        ("dataset", [str(prefix) for _, prefix, _ in found]),
        ("name", [name for name, _, _ in found]),
    ):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise RequestError(f"a {what} is named twice: {', '.join(twice)}", action="name it once, weights added")
    weighted = [weight is not None for _, _, weight in found]
    if any(weighted) and not all(weighted):
        raise RequestError("some datasets have a weight, others none", needed="weights for all, or for none")


def write_blend(path: Path, entries: list[BlendEntry]) -> None:
    """Write the file."""
    write_json(path, {"format": FORMAT, "datasets": [asdict(entry) for entry in entries]})


def read_blend(path: Path) -> list[BlendEntry]:
    """Read the file; prefixes come absolute.

    Raises RequestError when it is none, has a weight that is not positive or a dataset twice, or when a dataset has
    changed since it was written.
    """
    try:
        value = read_json(path)
        if value["format"] != FORMAT:
            raise ValueError(f"its format is {value['format']!r}, {FORMAT!r} is needed")
        entries = [BlendEntry(**entry) for entry in value["datasets"]]
        if not entries or not all(math.isfinite(entry.weight) and entry.weight > 0 for entry in entries):
            raise ValueError("every dataset needs a weight above 0")
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise RequestError(
            f"not a blend file: {what}", where=str(path), action="make one with tools/inspect_data.py blend"
        ) from error
    entries = [replace(entry, prefix=str((path.parent / entry.prefix).resolve())) for entry in entries]
    _check([(entry.name, Path(entry.prefix), entry.weight) for entry in entries])
    for entry in entries:
        found = open_pair(find_pairs(entry.prefix)[0]).num_tokens
        if found != entry.num_tokens:
            raise RequestError(
                f"{entry.prefix} has {found} tokens, {entry.num_tokens} when the blend was made",
                where=str(path),
                action="make the blend again with inspect_data.py blend",
            )
    return entries


def dataset_path(entries: list[BlendEntry]) -> str:
    """The mixture as Megatron writes it: 'weight prefix weight prefix ...', for --dataset_path."""
    return " ".join(f"{entry.weight:.6g} {entry.prefix}" for entry in entries)
