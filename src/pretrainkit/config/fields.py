"""The fields of a run by dotted name ('training.max_steps'), read from the schema."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass
from typing import Any

from pretrainkit.config.schema import RunConfig

_TYPE_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    tuple: "a list of texts",
    dict: "a mapping of names to texts",
}


@dataclass(frozen=True)
class Field:
    """One leaf of the schema."""

    dotted: str
    type: type
    """int, float, str or bool; tuple: of texts; dict: texts by name."""
    optional: bool
    """Whether null is a value."""
    default: Any

    @property
    def needed(self) -> str:
        """What a value must be, in words."""
        return _TYPE_WORDS[self.type] + (" or null" if self.optional else "")


def plain_type(annotation: Any) -> tuple[Any, bool]:
    """An annotation without its `| None`, and whether it had one."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
        assert len(inner) == 1, f"{annotation}: the schema knows no other unions"
        return inner[0], True
    return annotation, False


def _leaves(schema: type, prefix: str) -> dict[str, Field]:
    hints = typing.get_type_hints(schema)
    defaults = schema()
    leaves: dict[str, Field] = {}
    for field in dataclasses.fields(schema):
        annotation, optional = plain_type(hints[field.name])
        dotted = prefix + field.name
        if dataclasses.is_dataclass(annotation):
            leaves |= _leaves(typing.cast(type, annotation), f"{dotted}.")
        else:
            kind = typing.get_origin(annotation) or annotation
            leaves[dotted] = Field(dotted, kind, optional, getattr(defaults, field.name))
    return leaves


FIELDS: dict[str, Field] = _leaves(RunConfig, "")
"""Every leaf of RunConfig, in the schema's order."""

SECTIONS: tuple[str, ...] = tuple(dict.fromkeys(name.rpartition(".")[0] for name in FIELDS if "." in name))
"""Names of the schema's nested parts: data, parallel, ..."""


def value_of(config: RunConfig, dotted: str) -> Any:
    """The value of one field of a config."""
    value: Any = config
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


def closest(unknown: str, known: typing.Iterable[str]) -> str | None:
    """The known name that an unknown one was most likely meant to be, by its last part first."""
    names = list(known)
    spelled = unknown.replace("-", "_")
    by_end = {name.rpartition(".")[2]: name for name in reversed(names)}
    if spelled.rpartition(".")[2] in by_end:
        return by_end[spelled.rpartition(".")[2]]
    if close := difflib.get_close_matches(spelled, names, n=1):
        return close[0]
    close = difflib.get_close_matches(spelled.rpartition(".")[2], by_end, n=1)
    return by_end[close[0]] if close else None
