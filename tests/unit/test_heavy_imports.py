"""Packages that the engine's packages look for are not there while it is imported, and there afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import gc, importlib, importlib.metadata, importlib.util
from pretrainkit.imports import LEFT_OUT, heavy_imports

packages = [(name, {"sklearn": "scikit-learn"}.get(name, name)) for name in LEFT_OUT]

def says_that_it_is_missing(ask, name, error):
    try:
        return ask(name) is None
    except error:
        return True

try:
    with heavy_imports():
        for package, distribution in packages:
            assert says_that_it_is_missing(importlib.import_module, package, ImportError)
            assert says_that_it_is_missing(importlib.util.find_spec, package, ())
            assert says_that_it_is_missing(importlib.metadata.version, distribution, ImportError)
        assert importlib.metadata.version("numpy") and importlib.util.find_spec("numpy")
        FAIL
finally:
    import matplotlib
    for package, distribution in packages:
        assert importlib.metadata.version(distribution) and importlib.util.find_spec(package)
    assert gc.isenabled()
"""


@pytest.mark.parametrize("fails", [False, True], ids=["imports succeed", "an import fails"])
def test_packages_are_left_out_for_the_engine_alone(fails: bool) -> None:
    program = PROGRAM.replace("FAIL", "import no_such_package" if fails else "pass")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == fails and ("No module named 'no_such_package'" in done.stderr) == fails, done.stderr


def test_our_own_log_goes_on_during_the_imports() -> None:
    program = """
import logging
from pretrainkit import logs
from pretrainkit.imports import heavy_imports
logs.configure()
with heavy_imports():
    logging.getLogger("another").warning("kept back")
    logging.getLogger("another").error("an error")
    logs.get_logger("train").warning("ours")
logging.getLogger("another").warning("afterwards")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [line.split(" WARNING ")[-1] for line in done.stderr.splitlines()] == ["an error", "ours", "afterwards"]
