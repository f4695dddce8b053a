"""How an option of a run is declared: one dataclass field carries its type, default, help text, flag and range.

The parser, the YAML loader, the checks of single values and docs/options.md are all derived from these declarations.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pretrainkit.errors import RequestError
from pretrainkit.records import did_you_mean, plain_type

_TYPE_WORDS = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    tuple: "a list of strings",
    dict: "a mapping of names to strings",
}
AUTO = "auto"
"""What the default None is called where it stands for a choice by what is found."""
_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


@dataclass(frozen=True)
class Option:
    """An option of a run: a leaf of RunConfig."""

    default: Any
    help: str
    """What the option means, with its unit, as `--help` and docs/options.md show it."""
    flag: str | None = ""
    """The flag; empty: `--` and the field's name; None: the option is set by YAML and --set only."""
    short: str | None = None
    """The flag's short spelling."""
    unset: str = "none"
    """What the default None stands for, in the help text."""
    required: bool = False
    """Whether every run must give a value."""
    choices: tuple[str, ...] = ()
    """The words that are accepted; empty: any text."""
    range: str = ""
    """Bounds of a number, such as '> 0' or '>= 0 and < 1'."""
    form: str = ""
    """How the text must look, such as HH:MM:SS."""
    nargs: str | None = None
    """Of the flag of a mapping, as argparse has it: '+' takes several values after one flag."""
    parse: Callable[[str], object] | None = None
    """Raises ValueError for a text that doesn't have this form, or a RequestError that says more."""
    name: str = ""
    """Dotted, such as training.max_steps."""
    type: type = str
    """int, float, str or bool; tuple: of strings; dict: strings by name."""
    is_optional: bool = False
    """Whether None is a value."""

    @property
    def spelling(self) -> str:
        """How messages name the option: its flag, or its dotted name where it has none."""
        return self.flag or self.name

    @property
    def default_text(self) -> str:
        """The default as help and documents show it."""
        if self.required:
            return "required"
        if self.default is None:
            return self.unset
        if self.type is bool:
            return "on" if self.default else "off"
        return "none" if self.default in ((), {}) else str(self.default)

    def value_in(self, config: Any) -> Any:
        """The option's value in a RunConfig."""
        return operator.attrgetter(self.name)(config)

    def convert(self, value: Any, where: str) -> Any:
        """A value read from YAML or the command line, in the option's type. Raises RequestError for another type."""
        if self.is_optional and (value is None or (self.unset == AUTO and value == AUTO)):
            return None
        if self.type in (int, float) and type(value) in (int, str, self.type):
            try:
                return self.type(value)
            except ValueError:
                pass
        elif self.type is tuple and isinstance(value, (list, tuple)) and _are_texts(value):
            return tuple(value)
        elif self.type is dict and isinstance(value, dict) and _are_texts([*value, *value.values()]):
            return value
        elif self.type is str and type(value) is bool and ("off", "on")[value] in self.choices:
            return ("off", "on")[value]  # YAML's off and on
        elif self.type in (str, bool) and type(value) is self.type:
            return value  # nothing is converted to a string: YAML's 001 would become '1'
        raise RequestError(
            f"{self.name} is {value!r} ({type(value).__name__})",
            needed=_TYPE_WORDS[self.type] + (" or null" if self.is_optional else ""),
            action="put it in quotes" if self.type is str and not isinstance(value, (dict, list)) else "",
            where=where,
        )

    def check(self, value: Any) -> None:
        """Raise RequestError for an unknown word, a number out of range, or a text in the wrong form."""
        if value is None:
            return
        if self.choices and value not in self.choices:
            raise RequestError(
                f"unknown value {value!r}",
                needed=" or ".join(self.choices),
                action=did_you_mean(value, self.choices),
                where=self.spelling,
            )
        bounds = [bound.split() for bound in self.range.split(" and ") if bound]
        if bounds and not (math.isfinite(value) and all(_COMPARE[sign](value, float(end)) for sign, end in bounds)):
            raise RequestError(f"{value}", needed=f"{_TYPE_WORDS[self.type]} {self.range}", where=self.spelling)
        if self.parse:
            try:
                self.parse(value)
            except ValueError as error:
                raise RequestError(str(error), needed=self.form, where=self.spelling) from error


def option(default: Any, help: str, **declared: Any) -> Any:
    """A dataclass field that is an option of a run; `declared` are further fields of Option."""
    given: Any = {"default_factory": dict} if default == {} else {"default": default}
    return dataclasses.field(**given, metadata={"option": Option(default, help, **declared)})


def options_of(schema: type, section: str = "") -> dict[str, Option]:
    """The options that a dataclass and those nested in it declare, by dotted name and in their order."""
    hints = typing.get_type_hints(schema)
    options: dict[str, Option] = {}
    for field in dataclasses.fields(schema):
        annotation, is_optional = plain_type(hints[field.name])
        name = f"{section}{field.name}"
        if dataclasses.is_dataclass(annotation):
            options |= options_of(typing.cast(type, annotation), f"{name}.")
        else:
            declared: Option = field.metadata["option"]
            options[name] = dataclasses.replace(
                declared,
                name=name,
                flag=f"--{field.name}" if declared.flag == "" else declared.flag,
                type=typing.get_origin(annotation) or annotation,
                is_optional=is_optional,
            )
    return options


def _are_texts(values: typing.Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
