"""Checkpoints: formats, conversion, verification."""
