"""Imported once by the process that ranks are forked from."""

from pretrainkit.training import cpu

cpu.bridge()

from pretrainkit.training import nemo  # noqa: E402, F401
