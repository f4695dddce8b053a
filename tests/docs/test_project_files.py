"""Files that say how the project is licensed, checked and extended agree with what is there."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from doc_pages import REPOSITORY, read_page

from pretrainkit.models.registry import FAMILIES


def read(name: str) -> str:
    """The text of a file of the repository."""
    return (REPOSITORY / name).read_text(encoding="utf-8")


def project() -> dict:
    """The project's table of pyproject.toml."""
    return tomllib.loads(read("pyproject.toml"))["project"]


def test_the_hosted_ci_runs_the_commands_of_the_local_one() -> None:
    ours = [line for line in read(".ci/run").splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"].values()
    hosted = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert ours
    assert [line for line in hosted if line in ours] == ours


def test_the_hosted_ci_pins_actions_and_bounds_time() -> None:
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    for name, job in jobs.items():
        assert job["timeout-minutes"] <= 60, name
        assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
        version = tuple(map(int, re.search(r"python:(\d+)\.(\d+)", job["container"]["image"]).groups()))  # type: ignore[union-attr]
        low, high = re.findall(r"3\.(\d+)", project()["requires-python"])
        assert int(low) <= version[1] < int(high)


def test_the_licence_is_whole_and_named_in_the_package() -> None:
    text = read("LICENSE")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "9. Accepting Warranty" in text and "END OF TERMS AND CONDITIONS" in text
    assert project()["license"] == "Apache-2.0"
    assert project()["license-files"] == ["LICENSE"]


def test_the_changelog_has_the_agreed_form_and_names_the_version() -> None:
    headings = [text for _, text in read_page(REPOSITORY / "CHANGELOG.md").headings]
    assert headings[:2] == ["Changelog", "[Unreleased]"]
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    versions = [text for text in headings[1:] if text not in kinds]
    assert all(re.fullmatch(r"\[Unreleased\]|\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", text) for text in versions)
    assert project()["version"] in read("CHANGELOG.md")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_one_file_of_less_than_100_lines(family) -> None:  # type: ignore[no-untyped-def]
    assert len(read(f"src/pretrainkit/models/{family.name}.py").splitlines()) < 100


def test_the_example_of_a_family_is_the_source() -> None:
    blocks = read_page(REPOSITORY / "docs/adding-a-model-family.md").blocks
    (shown,) = [block.text for block in blocks if block.language == "python"]
    assert _definitions(shown) == _definitions(read("src/pretrainkit/models/seed_oss.py"))


def _definitions(source: str) -> list[str]:
    """Functions and assignments of a module, without annotations."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
        if isinstance(node, (ast.FunctionDef, ast.Assign)):
            found.append(ast.unparse(node))
    return found


def test_what_the_commands_write_by_default_is_no_part_of_the_source() -> None:
    """Job folders may hold tokens: they must not be added to git by chance."""
    ignored = read(".gitignore").splitlines()
    assert {"/experiments/", "/jobs/", "/diagnosis/", "/data/", "/build/"} <= set(ignored)


def test_docs_check_runs_this_folder() -> None:
    recipe = re.search(r"^docs-check:.*\n\t(.+)$", read("Makefile"), re.MULTILINE)
    assert recipe and str(Path(__file__).parent.relative_to(REPOSITORY)) in recipe[1].split()


def test_the_readmes_tree_names_what_is_there() -> None:
    tree = read("README.md").partition("    src/pretrainkit/\n")[2].partition("\n\n")[0]
    packages = {line.split()[0]: re.findall(r"\b[a-z_]+\b/?", line.split("/", 1)[1]) for line in tree.splitlines()}
    source = REPOSITORY / "src" / "pretrainkit"
    here = {f"{path.name}/" for path in source.iterdir() if (path / "__init__.py").exists()}
    assert set(packages) == here
    words = {"and", "a", "file", "for", "each"}
    for package, names in packages.items():
        for name in set(names) - words - {"family"}:
            assert (source / package / (name if name.endswith("/") else f"{name}.py")).exists(), package + name


def test_what_contributing_says_to_edit_is_there() -> None:
    table = read("CONTRIBUTING.md").partition("| to change | edit |")[2].partition("\n\n")[0]
    paths = re.findall(r"`([a-z_/]+(?:\.py)?)`", table)
    assert len(paths) > 12
    assert [path for path in paths if not (REPOSITORY / "src" / "pretrainkit" / path).exists()] == []


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports a test file by its name alone."""
    names = [path.name for path in (REPOSITORY / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
