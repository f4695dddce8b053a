"""What modules in FP8 have in common: copies of weights, what their casts note, and a switch to bf16."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

from pretrainkit.megatron.fp8.stats import Stats

_in_bf16 = False


@contextlib.contextmanager
def in_bf16() -> Iterator[None]:
    """Let all FP8 modules of this process compute in bf16."""
    global _in_bf16
    _in_bf16 = True
    try:
        yield
    finally:
        _in_bf16 = False


def computes_in_bf16() -> bool:
    """Whether `in_bf16` is active."""
    return _in_bf16


class Fp8Module(ABC):
    """A module whose products are in FP8."""

    @abstractmethod
    def update_copies(self) -> None:
        """Make the weights' FP8 copies where they aren't of this step."""

    @abstractmethod
    def stats(self) -> dict[str, Stats]:
        """What its casts note, by the name of their layer."""
