"""Records in JSON files: dataclasses decoded from parsed JSON, with every field's type checked; their leaves."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class RecordError(ValueError):
    """Parsed JSON that isn't the record that was expected: what was found, what is needed, what to do."""

    def __init__(self, found: str, *, needed: str = "", action: str = "") -> None:
        self.found, self.needed, self.action = found, needed, action
        super().__init__(f"{found}, not {needed}" if needed else found)


def decode(kind: type[T], value: Any, *, known_only: bool = True, all_fields: bool = True, name: str = "") -> T:
    """The dataclass `kind` from a parsed JSON object, with nested dataclasses, tuples and mappings.

    Args:
        kind: a dataclass, whose annotations say the types.
        value: the parsed JSON.
        known_only: refuse fields that `kind` doesn't have; otherwise they are ignored.
        all_fields: refuse a record in which any field is missing; otherwise only those without a default.
        name: the object's own dotted name, for messages.

    Raises RecordError, which names the field.
    """
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
    prefix = f"{name}." if name else ""
    for unknown in value.keys() - fields if known_only else ():
        raise RecordError(f"unknown field '{prefix}{unknown}'", action=did_you_mean(unknown, fields, prefix))
    for missing in (field for field in fields.values() if field.name not in value):
        if all_fields or missing.default is missing.default_factory is dataclasses.MISSING:
            raise RecordError(f"no field '{prefix}{missing.name}'")
    options = {"known_only": known_only, "all_fields": all_fields}
    given = [field for field in fields if field in value]
    return kind(**{field: _decode(hints[field], value[field], f"{prefix}{field}", options) for field in given})


def _decode(annotation: Any, value: Any, name: str, options: dict[str, bool]) -> Any:
    kind, is_optional = plain_type(annotation)
    if kind is Any or (value is None and is_optional):
        return value
    if dataclasses.is_dataclass(kind):
        return decode(typing.cast(type, kind), value, name=name, **options)
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is tuple and isinstance(value, (list, tuple)):
        items = enumerate(value)
        return tuple(_decode(arguments[0], item, f"{name}[{index}]", options) for index, item in items)
    if origin is dict and isinstance(value, dict):
        return {key: _decode(arguments[1], item, f"{name}.{key}", options) for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _wrong(name, value, {tuple: "a list", dict: "an object"}.get(origin, origin.__name__))
    return value


def plain_type(annotation: Any) -> tuple[Any, bool]:
    """An annotation without its `| None`, and whether it had one."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation, False
    (inner,) = (argument for argument in typing.get_args(annotation) if argument is not type(None))
    return inner, True


def did_you_mean(unknown: str, known: Iterable[str], prefix: str = "") -> str:
    """A suggestion of the known name that an unknown one was most likely meant to be, by its last part first.

    That may be equal, or have all words of the unknown one, such as lr_warmup_steps for warmup_steps.
    """
    names = list(known)
    spelled = unknown.replace("-", "_")
    by_end = {name.rpartition(".")[2]: name for name in reversed(names)}
    end = spelled.rpartition(".")[2]
    longer = [name for last, name in by_end.items() if set(end.split("_")) <= set(last.split("_"))]
    close = [by_end[end]] if end in by_end else longer or difflib.get_close_matches(spelled, names, n=1)
    close = close or [by_end[name] for name in difflib.get_close_matches(end, by_end, n=1)]
    return f"did you mean {prefix}{close[0]}?" if close else ""


def _wrong(name: str, value: Any, needed: str) -> RecordError:
    shown = f"{value!r} ({type(value).__name__})"
    return RecordError(f"{name} is {shown}" if name else shown, needed=needed)


def leaves(value: Mapping[str, Any], *, without: Collection[str] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of all that nested dicts hold, but what is at or below the names in `without`."""
    for name, item in value.items():
        if f"{prefix}{name}" in without:
            continue
        if isinstance(item, dict):
            yield from leaves(item, without=without, prefix=f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", item
