"""Sequences of one length in Arrow files: packing, writing once, reading."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`PackedDataset` is for users' scripts; it is imported when it is asked for."""
    if name == "PackedDataset":
        from pretrainkit.data.packed.format import PackedDataset

        return PackedDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
