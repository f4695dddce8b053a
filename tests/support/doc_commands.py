"""The project's own commands as pages show them: their flags and values as the real parsers take them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from doc_pages import REPOSITORY

ELISION = "..."
SCRIPT = re.compile(r"(?:\S*/)?((?:tools|pretraining|scripts|containers)/[\w./-]+\.(?:py|sh|sbatch))$")
"""A word that names a command of the project, by its path in the repository."""
_TOOL = re.compile(r"(?:tools|pretraining)/\w+\.py")


@cache
def module_of(script: str) -> Any:
    """A thin command, loaded from its path."""
    spec = importlib.util.spec_from_file_location("doc_" + Path(script).stem, REPOSITORY / script)
    assert spec and spec.loader, script
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def options_of(script: str) -> frozenset[str]:
    """The options that a command takes, subcommands included, spelled with dashes."""
    return frozenset(
        _spelling(option)
        for parser in with_subcommands(module_of(script).build_parser())
        for option in parser._option_string_actions
    )


@cache
def tools() -> tuple[str, ...]:
    """All commands that have a parser."""
    found = [path for folder in ("tools", "pretraining") for path in (REPOSITORY / folder).glob("*.py")]
    return tuple(sorted(str(path.relative_to(REPOSITORY)) for path in found))


def with_subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    below = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(child for choices in below for child in choices.values())]


def _spelling(option: str) -> str:
    return option.replace("_", "-")


def own_command(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The project's command among the words of one, and what follows it; None if there is none."""
    for position, word in enumerate(words):
        if match := SCRIPT.match(word):
            return match[1], list(words[position + 1 :])
    return None


def problem_of(script: str, words: list[str]) -> str | None:
    """What is wrong with the words after a command of the project; None if nothing is."""
    if not (REPOSITORY / script).is_file():
        return f"there is no {script}"
    if not script.endswith(".py"):
        return _problem_of_shell_script(script, words)
    try:
        arguments = parse(script, words)
    except ValueError as error:
        return str(error)
    return _problem_of_run(arguments) if script == "pretraining/pretrain.py" else None


def parse(script: str, words: list[str]) -> argparse.Namespace:
    """Parse words as the command does; `...` stands for any others. Raises ValueError with the parser's message."""
    parser = module_of(script).build_parser()
    is_cut = ELISION in words
    if is_cut:
        words = [word for word in words if word != ELISION]
        for one in with_subcommands(parser):
            for action in one._actions:
                action.required = False
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
            return parser.parse_args(words)
    except SystemExit as exit_:
        if not exit_.code:  # --help
            return argparse.Namespace()
        message = told.getvalue().strip().splitlines()[-1]
        if is_cut and re.search(r"expected (one|at least one) argument$", message):
            return argparse.Namespace()  # its value is among what is left out
        raise ValueError(message) from None


def _problem_of_run(arguments: argparse.Namespace) -> str | None:
    """What is wrong with a run before a model, data or machine is looked at: files, fields, values."""
    from pretrainkit.config.load import load_config
    from pretrainkit.config.parser import given_flags
    from pretrainkit.config.validate import problems_of_launch
    from pretrainkit.errors import RequestError

    if not hasattr(arguments, "config_files"):
        return None
    try:
        config = load_config(arguments.config_files, given_flags(arguments), arguments.assignments)
        RequestError.raise_all(problems_of_launch(config))
    except RequestError as error:
        return str(error)
    return None


def _problem_of_shell_script(script: str, words: list[str]) -> str | None:
    """Flags behind a shell script are its own, or those of the commands that it starts."""
    text = _text_with_callees(REPOSITORY / script)
    known = {_spelling(word) for word in re.findall(r"--?[A-Za-z][\w-]*", text)}
    for tool in {match[0] for match in _TOOL.finditer(text)}:
        known |= options_of(tool)
    flags = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
    unknown = [flag for flag in flags if _spelling(flag) not in known]
    return f"{script} doesn't know {', '.join(unknown)}" if unknown else None


def _text_with_callees(path: Path) -> str:
    """The text of a shell script, and of those beside it that it names."""
    text = path.read_text(encoding="utf-8")
    named = {path.with_name(name) for name in re.findall(r"[\w.-]+\.sh\b", text)} - {path}
    return "\n".join([text, *(other.read_text(encoding="utf-8") for other in sorted(named) if other.is_file())])
