"""Imports heavy packages quickly and quietly, without optional packages that are not used here.

NeMo's LLM collection imports 8,600 modules. The packages of `LEFT_OUT` are optional to those that import them:
torchmetrics plots with matplotlib, transformers computes metrics with scikit-learn, Megatron's timers report to W&B.
Without them and without garbage collection, importing the engine takes 8.2 s of CPU time instead of 11.0 and 776 MB
instead of 813; transformers' models take 3.3 s instead of 5.3 and 451 MB instead of 550. Garbage collection alone is
worth 2.6 s and 1.0 s of it (medians of 3 on 2 cores of a shared machine).

Nothing is compiled meanwhile. Megatron-core 0.15.3 builds a CUDA extension, for inference alone, when it is imported:
that takes seconds, writes to the home folder, waits forever for the lock of a process that was killed there, and ends
with an IndexError where torch is a CUDA build and the machine has no GPU.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from pretrainkit.logs import LOGGER_NAME

LEFT_OUT = ("matplotlib", "sklearn", "wandb")
_DISTRIBUTIONS = {"scikit-learn", *LEFT_OUT}


@contextmanager
def heavy_imports(*also_left_out: str) -> Iterator[None]:
    """Import Megatron, NeMo, Lightning or transformers in here; afterwards `LEFT_OUT` can be imported as usual.

    Their warnings about missing optional packages are dropped; this project's log records are not. torch is imported.

    Args:
        also_left_out: more packages that those imported here do without. With torch nothing is compiled either.
    """
    hidden = [name for name in (*LEFT_OUT, *also_left_out) if name not in sys.modules]
    collects = gc.isenabled()
    version, call_handlers = importlib.metadata.version, logging.Logger.callHandlers

    def version_of_others(distribution: str) -> str:
        if hidden and distribution.lower() in _DISTRIBUTIONS:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return version(distribution)

    def handle_failures_and_ours(logger: logging.Logger, record: logging.LogRecord) -> None:
        if record.levelno > logging.WARNING or record.name.partition(".")[0] == LOGGER_NAME:
            call_handlers(logger, record)

    gc.disable()
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(hidden))  # None: importing it fails, and find_spec gives None
    importlib.metadata.version = version_of_others  # type: ignore[assignment]
    logging.Logger.callHandlers = handle_failures_and_ours  # type: ignore[assignment, method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with nullcontext() if "torch" in hidden else _nothing_compiled():
                yield
    finally:
        logging.Logger.callHandlers = call_handlers  # type: ignore[method-assign]
        importlib.metadata.version = version
        for name in hidden:
            del modules[name]
        # Imported modules live until the process ends: collections need not traverse them.
        gc.freeze()
        if collects:
            gc.enable()


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Let torch's functions that compile an extension raise ImportError, which Megatron takes for "not available"."""
    from torch.utils import cpp_extension

    importing = True

    def outside_of_imports(build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def checked(name: str, *args: Any, **kwargs: Any) -> Any:
            if importing:
                raise ImportError(f"the extension {name} is not compiled while packages are imported")
            return build(name, *args, **kwargs)

        return checked

    builders = {name: getattr(cpp_extension, name) for name in ("load", "load_inline")}
    for name, build in builders.items():
        setattr(cpp_extension, name, outside_of_imports(build))
    try:
        yield
    finally:
        importing = False  # also for the modules that imported these functions by name
        for name, build in builders.items():
            setattr(cpp_extension, name, build)
