"""Writing files of `torch.save`: with an error that explains itself, and around bytes that come by other means."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pretrainkit.errors import CheckpointError


def save_archive(value: Any, path: Path) -> None:
    """`torch.save`, with an error that says what it may be about: torch only tells of an unexpected position."""
    try:
        torch.save(value, path)
    except RuntimeError as error:
        raise CheckpointError(
            f"writing failed ({str(error).splitlines()[0]})",
            where=str(path),
            action="look at the free space and the quota of the disk",
        ) from error


@dataclass(frozen=True)
class Frame:
    """A `torch.save` file of one contiguous tensor is `head`, the tensor's bytes, `tail`."""

    head: bytes
    tail: bytes


@lru_cache(maxsize=4096)
def frame(shape: tuple[int, ...], dtype: torch.dtype) -> Frame:
    """The frame that torch.save makes for a tensor of this shape and dtype; its checksum of the bytes is left 0."""
    stream = _SkippingStream()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), stream)  # memory that is never touched takes none
    head, tail = stream.parts
    return Frame(bytes(head), bytes(tail))


class _SkippingStream:
    """Collects what is written before and after the room for the tensor, which torch.save skips with `seek`."""

    def __init__(self) -> None:
        self.parts = [bytearray()]

    def write(self, data: bytes) -> int:
        self.parts[-1] += data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.parts.append(bytearray())
        return offset

    def flush(self) -> None:
        """Nothing is buffered."""
