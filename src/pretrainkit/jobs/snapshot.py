"""The source that a job runs: a copy made when it is submitted, so that later edits don't reach jobs that wait."""

from __future__ import annotations

import shutil
from pathlib import Path

import pretrainkit

_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*", "*.egg-info")


def copy_source(target: Path, script: Path) -> Path:
    """Copy this package and the folder of a command's script; gives the copy of the script.

    The layout is that of the checkout: target/src/pretrainkit, target/FOLDER/script.py. Uncommitted changes are
    copied too; `run/source.py` describes them.
    """
    package = Path(pretrainkit.__file__).parent
    shutil.copytree(package, target / "src" / package.name, ignore=_IGNORED)
    folder = target / script.parent.name
    shutil.copytree(script.parent, folder, ignore=_IGNORED)
    constraints = package.parents[1] / "constraints.txt"
    if constraints.is_file():  # a checkout: the preflight of a node compares with it
        shutil.copyfile(constraints, target / constraints.name)
    return folder / script.name
