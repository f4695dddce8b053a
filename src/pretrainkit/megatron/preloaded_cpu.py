"""Preload module of a fork server whose children run Megatron's model on the CPU: bridged and imported once.

A fork server preloads modules by name, so the import does the work. It bridges torch to the CPU for good, which a
process must do before it imports Megatron.
"""

from __future__ import annotations

from pretrainkit.imports import heavy_imports

with heavy_imports():
    from pretrainkit.megatron import cpu

    cpu.bridge()
    from pretrainkit.megatron import model as megatron_model  # noqa: F401
