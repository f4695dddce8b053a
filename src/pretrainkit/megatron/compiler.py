"""What Triton needs of a machine with GPUs: a C compiler with Python's headers, and a cache that can be written.

Every run on GPUs has kernels of Triton, its own or those of torch.compile (Megatron's fused layers). At their first
use, after the model is loaded, Triton compiles the module by which it starts them, and keeps it in its cache with the
kernels (triton/runtime/build.py and cache.py, read at 3.7.1).
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from pretrainkit.errors import RequestError
from pretrainkit.files import nearest_existing

_DRIVER_MODULES = "*/cuda_utils*.so"


def check_triton() -> None:
    """Raise RequestError where Triton can't compile: before a model is loaded, on the machine that trains it."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111  Path's fails without a home
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")).absolute()
    if not os.access(nearest_existing(cache), os.W_OK | os.X_OK):
        raise RequestError(
            f"{cache} can't be written",
            needed="a folder for the kernels that Triton compiles",
            action="set TRITON_CACHE_DIR, or cache_dir in the site's file, to a folder that can be written",
            where="Triton's cache",
        )
    if any(cache.glob(_DRIVER_MODULES)):
        return  # compiled by an earlier run, or on another node
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        found, action = f"no C compiler ({' or '.join(compilers)})", "install gcc, load its module, or set CC"
    elif not (header := Path(sysconfig.get_path("include"), "Python.h")).exists():
        found, action = f"no {header}", "install Python's headers (python3-dev), or use a Python that has them"
    else:
        return
    raise RequestError(
        found,
        needed="a C compiler and Python's headers on the machines that train: Triton compiles with them",
        action=f"{action}; or set TRITON_CACHE_DIR to a cache that a run has filled on such a machine",
        where="Triton",
    )
