"""Sequences of one length in Arrow files: packing, writing once, reading."""
