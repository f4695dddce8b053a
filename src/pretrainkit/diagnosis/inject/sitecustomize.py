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


class _Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules as usual, then calls what follows them."""

    def __init__(self) -> None:
        self._loaders: dict[str, Any] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER_IMPORT or name in self._loaders:
            return None
        self._loaders[name] = None  # find_spec below asks this finder, too
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        self._loaders[name] = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loaders[spec.name].create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # Relative lookups in torch expect its own loader.
        loader = self._loaders[module.__name__]
        if module.__spec__ is not None:
            module.__spec__.loader = loader
        module.__loader__ = loader
        loader.exec_module(module)
        owner, function = AFTER_IMPORT[module.__name__]
        getattr(importlib.import_module(owner), function)()


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


if os.environ.get("PRETRAINKIT_DIAGNOSIS_UNSET"):
    _keep_unset(os.environ["PRETRAINKIT_DIAGNOSIS_UNSET"].split(","))
if os.environ.get("PRETRAINKIT_DIAGNOSIS"):
    sys.meta_path.insert(0, _Hook())
    # This process can be measured, however long its imports take.
    open(os.path.join(os.path.dirname(os.environ["PRETRAINKIT_DIAGNOSIS"]), f"python_{os.getpid()}"), "w").close()

sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != HERE]
_own = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
if _own is not None and _own.loader is not None:
    _own.loader.exec_module(importlib.util.module_from_spec(_own))
