"""The engine is imported without the packages that it has no use for, and without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_no_compiler_runs_when_the_engine_is_imported(tmp_path: Path) -> None:
    """Also where torch is a CUDA build, which looks for a GPU's architecture before it compiles."""
    program = """
import os, sys
import torch
from torch.utils import cpp_extension
torch.version.cuda, cpp_extension.CUDA_HOME = "13.0", "/usr/local/cuda"  # as a CUDA build of torch has them
started = []
sys.addaudithook(lambda event, args: started.append(os.path.basename(args[0])) if event == "subprocess.Popen" else None)
from pretrainkit.imports import heavy_imports
with heavy_imports():
    from pretrainkit.megatron import cpu
    cpu.bridge()
    from pretrainkit.engine import train
compilers = {"ninja", "nvcc", "c++", "g++", "gcc", "cc", "clang", "ptxas"}.intersection(started)
assert not compilers, compilers
"""
    extensions = tmp_path / "extensions"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(extensions)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert not extensions.exists()


def test_an_extension_is_compiled_after_the_imports_alone() -> None:
    program = """
from torch.utils import cpp_extension
cpp_extension._jit_compile = lambda name, *_, **__: name
from pretrainkit.imports import heavy_imports
with heavy_imports():
    from torch.utils.cpp_extension import load
    try:
        load("an_extension", [])
    except ImportError as error:
        assert "an_extension" in str(error)
    else:
        raise AssertionError("compiled")
assert load("an_extension", [], build_directory="/tmp") == "an_extension"
assert cpp_extension.load("an_extension", [], build_directory="/tmp") == "an_extension"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_starts_the_ranks_has_no_torch() -> None:
    program = """
import sys
from pretrainkit.imports import heavy_imports
with heavy_imports("torch"):
    import nemo_run
print("torch" in sys.modules)
import torch
with heavy_imports("torch"):
    assert sys.modules["torch"] is torch
print(nemo_run.LocalExecutor.__name__, torch.float32)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "LocalExecutor", "torch.float32"]
