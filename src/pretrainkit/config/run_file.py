"""run.json, the one file that every rank reads: written and read exactly.

Unknown or missing fields, other types and other format versions are refused.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any, TypeVar

from pretrainkit import files
from pretrainkit.config.fields import closest, plain_type
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import PretrainkitError, RequestError

FORMAT_VERSION = 2
"""Raised whenever a reader of the old format would misread the new one."""
OLD_VERSIONS = (1,)
"""Formats that lack only fields which mean their defaults when they are missing."""

T = TypeVar("T")


def to_json(run: ResolvedRun) -> dict[str, Any]:
    """The JSON object of a run."""
    return {"format_version": FORMAT_VERSION, **dataclasses.asdict(run)}


def from_json(value: Any, where: str) -> ResolvedRun:
    """The run of a JSON object. Raises RequestError, naming `where` and the field, for the unexpected."""
    if not isinstance(value, dict):
        raise RequestError(f"{_shown(value)} instead of an object", where=where)
    fields = dict(value)
    version = fields.pop("format_version", None)
    if version not in (FORMAT_VERSION, *OLD_VERSIONS):
        raise RequestError(
            f"format version {version}",
            needed=f"version {FORMAT_VERSION}",
            action="write the file anew with this version of pretrain.py",
            where=where,
        )
    return _decode_dataclass(ResolvedRun, fields, where, "", is_old=version in OLD_VERSIONS)


def write_run(path: Path, run: ResolvedRun) -> None:
    """Write run.json atomically."""
    files.write_json(path, to_json(run))


def read_run(path: Path) -> ResolvedRun:
    """Read run.json. Raises RequestError with the file and field if it isn't one."""
    try:
        value = files.read_json(path)
    except FileNotFoundError:
        raise RequestError(
            "no such file",
            action="start the run with pretraining/pretrain.py, which writes it",
            where=str(path),
        ) from None
    except (OSError, ValueError) as error:
        raise RequestError(
            f"not readable as JSON: {error}",
            action="restore it (each attempt's log folder has that attempt's), or take another --experiment",
            where=str(path),
        ) from error
    return from_json(value, str(path))


def _decode_dataclass(kind: type[T], value: Any, where: str, prefix: str, *, is_old: bool) -> T:
    if not isinstance(value, dict):
        raise _wrong(where, prefix.rstrip("."), value, "an object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
    names = list(fields)
    for unknown in value.keys() - set(names):
        suggestion = closest(unknown, names)
        raise RequestError(
            f"unknown field '{prefix}{unknown}'",
            action=f"did you mean '{prefix}{suggestion}'?" if suggestion else "",
            where=where,
        )
    missing = [name for name in names if name not in value and not (is_old and _has_default(fields[name]))]
    if missing:
        raise RequestError(f"no field '{prefix}{missing[0]}'", where=where)
    given = (name for name in names if name in value)
    return kind(**{name: _decode(hints[name], value[name], where, prefix + name, is_old=is_old) for name in given})


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return not (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)


def _decode(annotation: Any, value: Any, where: str, name: str, *, is_old: bool) -> Any:
    kind, optional = plain_type(annotation)
    if value is None:
        if not optional:
            raise _wrong(where, name, value, "a value")
        return None
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), value, where, f"{name}.", is_old=is_old)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong(where, name, value, "a list")
        element = typing.get_args(kind)[0]
        return tuple(
            _decode(element, item, where, f"{name}[{index}]", is_old=is_old) for index, item in enumerate(value)
        )
    if typing.get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise _wrong(where, name, value, "an object")
        element = typing.get_args(kind)[1]
        return {key: _decode(element, item, where, f"{name}.{key}", is_old=is_old) for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _wrong(where, name, value, kind.__name__)
    return value


def _wrong(where: str, name: str, value: Any, needed: str) -> PretrainkitError:
    return RequestError(f"{name} is {_shown(value)}", needed=needed, where=where)


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"
