"""Every name that files outside the package import from it exists: some of them no other test runs."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("containers", "pretraining", "scripts", "tools", "tests/bench", "tests/gpu", "tests/support")
FILES = sorted(path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_imported_names_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pretrainkit":
            for name in (alias.name for alias in node.names):
                assert _exists(node.module or "", name), f"line {node.lineno}: {node.module} has no {name}"


def _exists(module: str, name: str) -> bool:
    """Whether a module defines a name, or a package has it as a module; read from the source, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin, f"no module {module}"
    if spec.submodule_search_locations and importlib.util.find_spec(f"{module}.{name}"):
        return True
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    defined: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return name in defined
