"""Read by Python at its start where diagnose_speed.py put this folder on PYTHONPATH: hooks torch once it is imported.

The folder takes itself off the path again, so that a sitecustomize of the environment is not lost.
"""
# Every process of the program pays for what is imported here.
# ruff: noqa: PTH100, PTH118, PTH120, PTH123

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
AFTER_IMPORT = {
    "torch": ("pretrainkit.diagnosis.probes.plan", "install"),
    "huggingface_hub.hf_api": ("pretrainkit.diagnosis.observe.uploads", "hold_back_commits"),
}
"""Module -> what is called once it is imported, before any code of the program has seen it."""


class _Hook(importlib.abc.MetaPathFinder):
    """Lets modules be imported as usual, and calls what follows them."""

    def __init__(self) -> None:
        self._found: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER_IMPORT or name in self._found:
            return None
        self._found.add(name)  # find_spec below asks this finder, too
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec else None
        if loader is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            owner, function = AFTER_IMPORT[name]
            getattr(importlib.import_module(owner), function)()

        loader.exec_module = exec_module
        return spec


def _keep_unset(names: list[str]) -> None:
    """Take variables out of the environment, and let the program's own assignments to them pass without effect."""
    environ: Any = type(os.environ)
    assign = environ.__setitem__

    def guarded(self: Any, name: str, value: str) -> None:
        if name not in names:
            assign(self, name, value)

    environ.__setitem__ = guarded
    for name in names:
        os.environ.pop(name, None)


def _can_be_measured() -> None:
    """Say so of this process, however long its imports take."""
    open(os.path.join(os.path.dirname(os.environ["PRETRAINKIT_DIAGNOSIS"]), f"python_{os.getpid()}"), "w").close()


if os.environ.get("PRETRAINKIT_DIAGNOSIS_UNSET"):
    _keep_unset(os.environ["PRETRAINKIT_DIAGNOSIS_UNSET"].split(","))
if os.environ.get("PRETRAINKIT_DIAGNOSIS"):
    sys.meta_path.insert(0, _Hook())
    _can_be_measured()
    os.register_at_fork(after_in_child=_can_be_measured)

sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
_own = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _own is not None and _own.loader is not None:
    _own.loader.exec_module(importlib.util.module_from_spec(_own))
