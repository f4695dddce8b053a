"""WebDataset token shards: format, writing, and reading them in an order that can be resumed."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`make_loader` is for users' scripts; it is imported when it is asked for, since it brings torch."""
    if name == "make_loader":
        from pretrainkit.data.shards.loader import make_loader

        return make_loader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
