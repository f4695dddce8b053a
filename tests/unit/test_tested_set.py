"""The tested set: whole, of one version each, with the hash of every file, and in accord with what packages ask for."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OVERRIDDEN = {("torchx", "urllib3")}
"""Which package asks for another version of which than the set has: pyproject.toml says why."""


def pins(name: str) -> dict[str, str]:
    """Version by name of the lines of a file that are requirements; those for tools alone are left out."""
    text = (ROOT / name).read_text().partition("# Only for")[0]
    found = re.findall(r"^([a-z0-9._-]+)==([^ \n\\]+)", text, re.MULTILINE)
    assert len(found) == len(dict(found))
    return dict(found)


def needed(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def test_the_lock_has_the_versions_of_the_constraints_and_a_hash_for_each() -> None:
    assert pins("requirements.lock") == pins("constraints.txt")
    blocks = re.split(r"^(?=[a-z])", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)[1:]
    assert len(blocks) == len(pins("requirements.lock"))
    assert all("--hash=sha256:" in block for block in blocks)
    assert not re.search("https?://", (ROOT / "requirements.lock").read_text() + (ROOT / "constraints.txt").read_text())


def test_overrides_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    overrides = {Requirement(line).name for line in project["tool"]["uv"]["override-dependencies"]}
    assert overrides == {name for _, name in OVERRIDDEN}


def test_what_is_installed_is_the_whole_set_and_fits() -> None:
    """Walks from the project to everything that it needs, as pip would resolve it."""
    tested, problems, seen = pins("constraints.txt"), [], set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    todo = [("pretrainkit", Requirement(line), "") for line in wanted]
    while todo:
        asker, requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if not needed(requirement, extra):
            continue
        if name not in tested:
            problems.append(f"{asker} needs {requirement}, which is not in constraints.txt")
            continue
        if not requirement.specifier.contains(tested[name], prereleases=True) and (asker, name) not in OVERRIDDEN:
            problems.append(f"{asker} needs {requirement}, constraints.txt has {tested[name]}")
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name} is not installed, {asker} needs it")
            continue
        for asked in {"", *requirement.extras} - {known for known_name, known in seen if known_name == name}:
            seen.add((name, asked))
            todo += [(name, Requirement(line), asked) for line in distribution.requires or []]
    assert not problems
