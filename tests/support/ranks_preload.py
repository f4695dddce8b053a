"""Imported once by the process that ranks are forked from."""

from pretrainkit.imports import heavy_imports

with heavy_imports():
    from pretrainkit.megatron import cpu

    cpu.bridge()
    from pretrainkit.engine import train  # noqa: F401
