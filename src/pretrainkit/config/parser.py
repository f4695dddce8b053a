"""The command line of a run: argparse flags made from the declarations of the options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretrainkit.config.option import AUTO, Option
from pretrainkit.config.schema import OPTIONS
from pretrainkit.errors import RequestError

_GROUPS = {
    "": "experiment and model",
    "data": "data",
    "parallel": "parallelism",
    "training": "training",
    "optimizer": "optimizer",
    "tracking": "tracking",
    "launch": "launch and container",
}
"""Sections of the schema, in the order in which --help shows them, and their titles there."""

_SWITCHES = {
    "--dry_run": "check everything, write run.json, print the resolved run and the command or job script; "
    "start nothing",
    "--follow": "show the log of a scheduled job until it ends, and exit with its exit code",
    "--plan": "print what a start would load, where it would continue, and what changed; start nothing",
    "--list": "print the experiments in --experiments_dir with state, step, last losses and job; start nothing",
    "--json": "print the --plan or the --list as JSON",
}
"""Flags without a value that say what to do with a request, and their help."""


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all options of a run, and those that say how it is asked for, to a parser.

    Flags that were not given are absent from the parsed namespace, so that they don't override YAML.
    """
    for section, title in _GROUPS.items():
        group = parser.add_argument_group(title)
        for option in OPTIONS.values():
            if option.flag and option.name.rpartition(".")[0] == section:
                add_flag(group, option)
    request = parser.add_argument_group("request")
    request.add_argument(
        "--config",
        dest="config_files",
        action="append",
        default=[],
        type=Path,
        metavar="YAML",
        help="file with any options of a run; repeatable, later files win; flags and --set win over all files",
    )
    request.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="set any option by its dotted name, such as optimizer.adam_beta2=0.99; repeatable",
    )
    for flag, text in _SWITCHES.items():
        request.add_argument(flag, action="store_true", help=text)
    request.add_argument(
        "-v", "--verbose", action="store_true", help="log details, such as the kernel of each operation"
    )
    request.add_argument(
        "--hf_token",
        metavar="TOKEN",
        help="Hugging Face token; others here may see it for a moment, so HF_TOKEN in the environment is safer",
    )


def add_flag(group: argparse._ActionsContainer, option: Option, *, with_short: bool = True) -> None:
    """Add an option's flag to a parser or one of its groups; if it isn't given, it is absent from the namespace."""
    assert option.flag
    names = (option.short, option.flag) if option.short and with_short else (option.flag,)
    settings: dict[str, Any]
    text = option.help
    if option.type is bool:
        settings = {"action": "store_true"}
    elif option.type in (tuple, dict):
        settings = {"action": "append", "metavar": "NAME=VALUE" if option.type is dict else "TEXT"}
        if option.nargs:
            settings |= {"action": "extend", "nargs": option.nargs}
        text += "; repeatable"
    else:
        choices = f"{{{','.join(option.choices)}}}" if option.choices else ""
        # Values are checked with all others, so that all problems are reported at once.
        kind = option.type if option.unset != AUTO else _value_or_auto(option.type)
        settings = {"type": kind, "metavar": choices or option.form or option.type.__name__.upper()}
        text += f" ({'' if option.required else 'default: '}{option.default_text})"
    group.add_argument(*names, dest=option.name, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **settings)


def _value_or_auto(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        return text if text == AUTO else kind(text)

    convert.__name__ = kind.__name__  # argparse says "invalid int value"
    return convert


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options whose flags were given: dotted name -> value. Raises RequestError for a NAME=VALUE without '='."""
    given = {name: value for name, value in vars(arguments).items() if name in OPTIONS}
    return {name: _mapping(name, value) if OPTIONS[name].type is dict else value for name, value in given.items()}


def _mapping(name: str, words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for key, equals, value in pairs:
        if not key or not equals:
            raise RequestError(f"{key + value!r}", needed="NAME=VALUE", where=OPTIONS[name].spelling)
    return {key: value for key, _, value in pairs}
