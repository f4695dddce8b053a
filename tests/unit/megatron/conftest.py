"""Imports Megatron before the tests of this folder do, as the commands import it."""

from pretrainkit.imports import heavy_imports

with heavy_imports():
    import megatron.core  # noqa: F401
