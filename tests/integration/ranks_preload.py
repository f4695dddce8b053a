"""Imported once by the process that ranks are forked from."""

from pretrainkit.training.engine_imports import engine_imports

with engine_imports():
    from pretrainkit.training import cpu

    cpu.bridge()
    from pretrainkit.training import nemo  # noqa: F401
