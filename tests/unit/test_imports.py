"""Modules import in one direction, and a command's help needs nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
HEAVY = ("torch", "nemo", "megatron", "lightning", "transformers", "nemo_run", "datasets")


def test_the_import_contracts_hold() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run([sys.executable, "-c", code, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def loaded_by(code: str, *words: str) -> list[str]:
    """Heavy modules that are loaded after running some code."""
    report = (
        "import sys\ntry:\n    exec(sys.argv.pop(1))\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", report, code, *words], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return eval(done.stderr.splitlines()[-1])  # the list that we have just printed


def modules_of(*packages: str) -> list[str]:
    source = REPOSITORY / "src"
    paths = [path for package in packages for path in sorted((source / "pretrainkit" / package).glob("*.py"))]
    return [str(path.relative_to(source).with_suffix("")).replace("/", ".").removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize("module", ["pretrainkit.cli", *modules_of("config", "launch", "models")])
def test_a_module_that_commands_import_first_is_light(module: str) -> None:
    assert loaded_by(f"import {module}") == []


@pytest.mark.parametrize("script", sorted(path.name for path in (REPOSITORY / "pretraining").glob("*.py")))
def test_help_is_light(script: str) -> None:
    code = f"import runpy; sys.argv[0] = {script!r}; runpy.run_path('pretraining/{script}', run_name='__main__')"
    assert loaded_by(code, "--help") == []
