#!/usr/bin/env python3
"""Installs this project's packages into the image's Python, and leaves the image's own torch and its kin alone.

Used by Dockerfile, pretrainkit.def and enroot.sh, inside the image that is being built. Versions come from
constraints.txt; packages of TORCH_PACKAGES and KEEP_PACKAGES (versions.env) that the image has stay as they are. Two
files for check.sh are written to image/ beside constraints.txt:

    kept.txt          the packages that stayed, name==version
    constraints.txt   the project's, with those versions in place of its own
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

DONE, FAILED = 0, 1
PIP_CONF = Path("/mnt/pip.conf")
"""pip's settings for the build alone, where a builder puts them."""
LIST_INSTALLED = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions() if d.metadata['Name']}))"
)


class InstallError(Exception):
    """Why an image can't be made."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="install_packages.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--project", type=Path, default=Path(__file__).resolve().parents[1], help="the project's folder"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be installed, and stop")
    arguments = parser.parse_args(argv)
    try:
        install(arguments.project, dry_run=arguments.dry_run)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    return DONE


def install(project: Path, *, dry_run: bool) -> None:
    """Install what `project` needs and the project itself (editable). Raises InstallError."""
    if (project / ".git").exists() and not dry_run:
        raise InstallError(f"{project} is a checkout, not a copy in an image\n  What to do: make setup")
    settings = project / "containers" / "versions.env"
    of_torch = read_setting(settings, "TORCH_PACKAGES").split(",")
    patterns = [*of_torch, *read_setting(settings, "KEEP_PACKAGES").split(",")]
    kept = {name: version for name, version in list_installed().items() if is_kept(name, patterns)}
    say(f"stay as they are: {', '.join(f'{name} {version}' for name, version in sorted(kept.items())) or 'none'}")
    overridden = read_overrides(project / "pyproject.toml")
    merged = merge_constraints((project / "constraints.txt").read_text(encoding="utf-8"), kept)
    with tempfile.TemporaryDirectory(prefix="install_packages_") as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text(without_lines_of(merged, overridden), encoding="utf-8")
        pip = Pip(Path(folder, "cache"))
        wanted = resolve(pip, project, constraints, kept)
        wanted = without_provided(wanted, kept, of_torch)
        wanted |= {name: version for name, version in pins_in(merged).items() if name in wanted and name in overridden}
        refuse_kept(wanted, kept, of_torch)
        say(f"to be installed: {', '.join(f'{name} {version}' for name, version in sorted(wanted.items()))}")
        if dry_run:
            return
        problems = pip.problems()
        pins = Path(folder, "pins.txt")
        pins.write_text("".join(f"{name}=={version}\n" for name, version in sorted(wanted.items())), encoding="utf-8")
        if wanted:
            pip.run("install", "--no-deps", "--requirement", str(pins))
        pip.run("install", "--no-deps", "--editable", str(project))
        for problem in sorted(pip.problems() - problems):
            say(f"warning: {problem}")
    check_unchanged(kept, list_installed())
    record = project / "image"
    record.mkdir(exist_ok=True)
    (record / "kept.txt").write_text(
        "".join(f"{name}=={version}\n" for name, version in sorted(kept.items())), encoding="utf-8"
    )
    (record / "constraints.txt").write_text(merged, encoding="utf-8")


class Pip:
    """pip of this Python: with a cache of its own, without the image's constraints, which ours take in."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        ignored = ("PIP_CONSTRAINT", "PIP_NO_CACHE_DIR")
        self._environment = {name: value for name, value in os.environ.items() if name not in ignored}
        self._environment |= {
            "PIP_BREAK_SYSTEM_PACKAGES": "1",  # the image's Python is meant, not one of a virtual environment
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
            "PYTHONNOUSERSITE": "1",
        }
        if PIP_CONF.is_file():
            self._environment["PIP_CONFIG_FILE"] = str(PIP_CONF)

    def run(self, *words: str, output: bool = False) -> str:
        """Run pip; gives its stdout where `output`, else shows it. Raises InstallError."""
        command = [sys.executable, "-m", "pip", *words]
        if words[0] == "install":
            command += ["--cache-dir", str(self._cache), "--no-warn-script-location"]
        done = subprocess.run(
            command, env=self._environment, text=True, stdout=subprocess.PIPE if output else None, check=False
        )
        if done.returncode:
            raise InstallError(f"pip {words[0]} ended with {done.returncode}; its own words are above")
        return done.stdout or ""

    def problems(self) -> set[str]:
        """What `pip check` says about packages that don't fit each other."""
        done = subprocess.run(
            [sys.executable, "-m", "pip", "check"], env=self._environment, text=True, capture_output=True, check=False
        )
        return set(done.stdout.splitlines()) if done.returncode else set()


def resolve(pip: Pip, project: Path, constraints: Path, kept: dict[str, str]) -> dict[str, str]:
    """Name -> version of what has to be installed, the project itself left out. Raises InstallError."""
    report = constraints.with_name("report.json")
    words = ("--dry-run", "--report", str(report), "--constraint", str(constraints), str(project))
    try:
        pip.run("install", *words)
    except InstallError as error:
        if not kept:
            raise
        raise InstallError(
            f"{error}\n  If it says that versions conflict, what stays of the image doesn't fit constraints.txt.\n"
            f"  What to do: choose another image in versions.env"
        ) from error
    items = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = {normal(item["metadata"]["name"]): item["metadata"]["version"] for item in items}
    return {name: version for name, version in found.items() if name != "pretrainkit"}


def without_provided(wanted: dict[str, str], kept: dict[str, str], of_torch: Sequence[str]) -> dict[str, str]:
    """`wanted` without what the image's torch brings under another name, such as pytorch-triton for triton."""
    found = {
        name
        for name in wanted
        if "torch" in kept and is_kept(name, of_torch) and name not in kept and find_spec(name.replace("-", "_"))
    }
    for name in sorted(found):
        say(f"{name} is the image's own, under another name")
    return {name: version for name, version in wanted.items() if name not in found}


def refuse_kept(wanted: dict[str, str], kept: dict[str, str], of_torch: Sequence[str]) -> None:
    """Raise InstallError when pip would replace what stays or, where torch stays, add what is compiled for another."""
    forbidden = [*kept, *(of_torch if "torch" in kept else ())]
    bad = [f"{name} {version}" for name, version in sorted(wanted.items()) if is_kept(name, forbidden)]
    if bad:
        raise InstallError(
            f"would be put into an image that has its own torch: {', '.join(bad)}\n"
            f"  Needed: these packages come from the image alone\n"
            f"  What to do: choose an image in versions.env that has them"
        )


def check_unchanged(kept: dict[str, str], after: dict[str, str]) -> None:
    """Raise InstallError when a package that should have stayed has another version now, or none."""
    changed = [f"{name} {version} -> {after.get(name, 'none')}" for name, version in kept.items()]
    changed = [text for text, name in zip(changed, kept, strict=True) if after.get(name) != kept[name]]
    if changed:
        raise InstallError(f"replaced, though they must stay: {', '.join(changed)}")


def read_overrides(path: Path) -> set[str]:
    """Names of packages whose version in constraints.txt another package's metadata refuses, which pip would obey."""
    uv = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("uv", {})
    return {normal(re.split("[<>=!~ ]", line)[0]) for line in uv.get("override-dependencies", [])}


def pins_in(text: str) -> dict[str, str]:
    """Name -> version of the lines of a constraints.txt."""
    return {normal(name): version for name, version in re.findall(r"^([A-Za-z0-9._-]+)\s*==\s*([^\s;]+)", text, re.M)}


def without_lines_of(text: str, names: set[str]) -> str:
    """A constraints.txt without the lines of these packages."""
    return "".join(line for line in text.splitlines(keepends=True) if not pins_in(line).keys() & names)


def merge_constraints(text: str, kept: dict[str, str]) -> str:
    """The project's constraints with the versions of `kept` in place of its own."""
    lines = []
    for line in text.splitlines():
        match = re.match(r"\s*([A-Za-z0-9._-]+)\s*==", line)
        if not (match and normal(match[1]) in kept):
            lines.append(line)
    lines += ["# the image's own, which stay", *(f"{name}=={version}" for name, version in sorted(kept.items()))]
    return "\n".join(lines) + "\n"


def list_installed() -> dict[str, str]:
    """Name -> version of everything installed, seen by a new process: this one may remember what was."""
    done = subprocess.run([sys.executable, "-s", "-c", LIST_INSTALLED], text=True, stdout=subprocess.PIPE, check=True)
    return {normal(name): version for name, version in json.loads(done.stdout).items()}


def is_kept(name: str, patterns: Iterable[str]) -> bool:
    """Whether a package is one that the image keeps; patterns may hold *."""
    return any(fnmatch.fnmatchcase(normal(name), pattern) for pattern in patterns)


def read_setting(path: Path, name: str) -> str:
    """The value of NAME=VALUE in a file. Raises InstallError when it isn't there."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}="):
            return line.partition("=")[2].strip()
    raise InstallError(f"{path}: no {name}=")


def normal(name: str) -> str:
    """A package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def say(text: str) -> None:
    """A line about what is done."""
    print(f"install_packages: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
