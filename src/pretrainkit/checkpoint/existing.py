"""Whether the target of a conversion is there already, as the same request would write it now.

A Hugging Face folder carries no record of its conversion, so the proof is a second conversion to a temporary folder
whose files are compared byte by byte. What differs in most cases is seen before its weights are written: the format,
the names, dtypes and shapes of tensors, the first row of each, and the files around them.
"""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from pretrainkit.checkpoint.formats.hf_files import ORIGIN_NAME, REPORT_NAME, is_weight_file
from pretrainkit.checkpoint.lazy_tensor import same_bits
from pretrainkit.checkpoint.open import WeightReader, detect, open_reader
from pretrainkit.checkpoint.origin import read_origin
from pretrainkit.checkpoint.plan import ConversionPlan, Options
from pretrainkit.errors import PretrainkitError, RequestError
from pretrainkit.files import read_object

_VARYING = {"elapsed_s", "target", "workers"}
"""Fields of a report that say nothing of what was asked for; the folder may have been renamed since."""
_MAX_DIFFERENCES, _MAX_LENGTH = 4, 200


def with_files_of(target: Path, options: Options) -> Options:
    """`options` with the number of workers that the target was written by: torch_dist has a file for each of them."""
    workers = read_object(target / REPORT_NAME).get("workers")
    return replace(options, workers=workers) if isinstance(workers, int) and workers > 0 else options


def check_weights(target: Path, reader: WeightReader, plan: ConversionPlan, origin: list[dict[str, Any]]) -> None:
    """Raise RequestError where headers, origin or first rows show that the target holds something else."""
    try:
        found = detect(target)
        there = open_reader(found, plan.mappings, plan.shape) if found.format is plan.format else None
        stated = read_origin(found)
    except PretrainkitError as error:
        _refuse(target, error.found if error.where in ("", str(target)) else f"{error.where}: {error.found}")
    if there is None:
        _refuse(target, f"it is {found.format} and not {plan.format}")
    if stated != origin:
        _refuse(target, f"{ORIGIN_NAME} states another origin: {_cut(str(stated))} and not {_cut(str(origin))}")
    _refuse_any(target, _different_tensors(reader, there, plan))


def check_files(target: Path, staged: Path, *, is_complete: bool) -> None:
    """Raise RequestError unless the target has the files of the temporary folder; once that is complete, and no others.

    Weight files are compared once they are complete.
    """
    names = {name for name in _file_names(staged) if is_complete or not is_weight_file(staged / name)}
    differences = (each for name in sorted(names) if (each := _difference(target / name, staged / name, name)))
    _refuse_any(target, differences)
    if is_complete:
        _refuse_any(target, (f"{name} isn't part of it" for name in sorted(_file_names(target) - names)))


def _different_tensors(reader: WeightReader, there: WeightReader, plan: ConversionPlan) -> Iterator[str]:
    for mapping in plan.mappings:
        dtype = plan.dtypes[mapping]
        if there.dtypes[mapping] != dtype:
            yield f"{mapping.hf[0]} is {there.dtypes[mapping]} and not {dtype}".replace("torch.", "")
            continue
        for name, ours, theirs in zip(mapping.part_names, reader.read(mapping), there.read(mapping), strict=True):
            if not same_bits(ours.to(dtype).rows(0, 1).tensor(), theirs.rows(0, 1).tensor()):
                yield f"{name} has other values"


def _difference(there: Path, ours: Path, name: str) -> str:
    """How a file of the target differs from ours; empty if it doesn't."""
    if not there.is_file():
        return f"{name} is missing"
    if filecmp.cmp(there, ours, shallow=False):
        return ""
    old, new = read_object(there), read_object(ours)
    different = {field for field in old.keys() | new.keys() if old.get(field) != new.get(field)}
    if name == REPORT_NAME and old and different <= _VARYING:
        return ""
    fields = [f"{field} {old.get(field)!r} and not {new.get(field)!r}" for field in sorted(different - _VARYING)]
    return f"{name} has {_first(fields)}" if fields else f"{name} has other bytes"


def _file_names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def _refuse_any(target: Path, differences: Iterator[str]) -> None:
    if found := list(islice(differences, _MAX_DIFFERENCES + 1)):
        _refuse(target, _first(found))


def _first(differences: list[str]) -> str:
    more = ["and more"] if len(differences) > _MAX_DIFFERENCES else []
    return "; ".join([*map(_cut, differences[:_MAX_DIFFERENCES]), *more])


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"


def _refuse(target: Path, difference: str) -> NoReturn:
    raise RequestError(
        f"exists, and isn't what this request writes: {difference}",
        where=str(target),
        action="choose another folder, or --overwrite",
    )
