"""The file of --add-tokens: which tokens a vocabulary gets, and what their rows begin as."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pretrainkit.errors import RequestError

MEAN, PIECES, COPY = "mean", "pieces", "copy:"
"""How a row begins: mean of the rows of all tokens, mean of the rows of the text's pieces, or another token's row."""
_MAX_PROBLEMS = 8
_FIELDS = {"token": str, "special": bool, "init": str}


@dataclass(frozen=True)
class NewToken:
    """A token to be added."""

    text: str
    init: str = MEAN
    """MEAN, PIECES, or COPY followed by a token."""
    special: bool = False
    """Left out of decoded text, as end of text is."""


def check_init(init: str, where: str) -> str:
    """`init` itself. Raises RequestError unless it is the name of an initialisation."""
    if init in (MEAN, PIECES) or (init.startswith(COPY) and init != COPY):
        return init
    raise RequestError(f"initialisation {init!r}", where=where, needed=f"{MEAN}, {PIECES} or {COPY}TOKEN")


def read_new_tokens(path: Path, init: str) -> tuple[NewToken, ...]:
    """The tokens in a file: JSON lines where its name ends in .jsonl, otherwise one a line.

    `init` is the initialisation where a line names none. Raises RequestError that names every wrong line.
    """
    check_init(init, "--new-token-init")
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 ({error})"
        raise RequestError(str(reason), where=str(path), needed="a UTF-8 text file with a token a line") from error
    if lines[-1] == "":
        lines.pop()
    problems: list[RequestError] = []
    tokens: dict[str, NewToken] = {}
    for number, line in enumerate(lines, 1):
        with RequestError.collected(problems):
            where = f"{path}:{number}"
            token = _of_json(line, init, where) if path.suffix == ".jsonl" else _of_text(line, init, where)
            if token.text in tokens:
                raise RequestError(f"token {token.text!r} a second time", where=where)
            tokens[token.text] = token
    raise_first(problems)
    if not tokens:
        raise RequestError("no tokens in it", where=str(path), needed="a token a line")
    return tuple(tokens.values())


def raise_first(problems: list[RequestError]) -> None:
    """Raise the first problems, if there are any: a file may have thousands of lines."""
    if len(problems) > _MAX_PROBLEMS:
        problems = [*problems[:_MAX_PROBLEMS], RequestError(f"{len(problems) - _MAX_PROBLEMS} more like these")]
    RequestError.raise_all(problems)


def _of_text(line: str, init: str, where: str) -> NewToken:
    if not line.strip() or line != line.strip():
        raise RequestError(
            f"{line!r}",
            where=where,
            needed="a token without white space around it",
            action="a token that has some is written in a .jsonl file",
        )
    return NewToken(line, init)


def _of_json(line: str, init: str, where: str) -> NewToken:
    needed = 'an object such as {"token": "<|x|>", "special": true, "init": "copy:<|end|>"}'
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise RequestError(f"not JSON: {error}", where=where, needed=needed) from error
    if not isinstance(fields, dict) or not fields.get("token"):
        raise RequestError(f"{line!r} has no token", where=where, needed=needed)
    if unknown := sorted(fields.keys() - _FIELDS.keys()):
        raise RequestError(f"unknown fields {', '.join(unknown)}", where=where, needed=needed)
    if wrong := [name for name, value in fields.items() if not isinstance(value, _FIELDS[name])]:
        raise RequestError(f"{', '.join(wrong)} of another type", where=where, needed=needed)
    return NewToken(fields["token"], check_init(fields.get("init", init), where), fields.get("special", False))
