"""Megatron's model on the CPU, bridged and imported once, by the process that ranks are forked from (preloaded there).

Importing it bridges torch to the CPU for good, which a process must do before it imports Megatron.
"""

from __future__ import annotations

from pretrainkit.imports import heavy_imports

with heavy_imports():
    from pretrainkit.megatron import cpu

    cpu.bridge()
    from pretrainkit.megatron import model as megatron_model  # noqa: F401
