"""Sequences of one length in Arrow files: packing, writing once, reading."""

from pretrainkit.data.packed.format import PackedDataset

__all__ = ["PackedDataset"]
