"""Every text that the source can say, with `…` where a value is put in: what docs/troubleshooting.md quotes."""

from __future__ import annotations

import ast
import re
from functools import cache

from doc_pages import REPOSITORY

VALUE = "…"
_PLACE = re.compile(r"%(?:\(\w+\))?[.0-9]*[sdf]")
"""Where logging puts a value in."""


@cache
def messages() -> tuple[str, ...]:
    """Texts of src, tools, pretraining, without docstrings; those of shell scripts, whole lines."""
    found: list[str] = []
    for folder in ("src/pretrainkit", "tools", "pretraining"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            found += _texts_of(ast.parse(path.read_text(encoding="utf-8")))
    scripts = [*REPOSITORY.glob("src/pretrainkit/jobs/templates/*.j2"), *REPOSITORY.glob("scripts/*.sh")]
    for path in sorted(scripts):
        found += path.read_text(encoding="utf-8").splitlines()
    return tuple(dict.fromkeys(found))


def _texts_of(tree: ast.AST) -> list[str]:
    found = []
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)) and id(node) not in docstrings:
            text = _text_of(node)
            if text.strip(VALUE):
                found.append(text)
    return found


def _text_of(node: ast.AST) -> str:
    """A string with its values replaced; `…` for everything else."""
    if isinstance(node, ast.Constant):
        return _PLACE.sub(VALUE, node.value) if isinstance(node.value, str) else VALUE
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text_of(node.left) + _text_of(node.right)
    return VALUE
