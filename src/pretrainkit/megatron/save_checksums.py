"""CRC-32 of each chunk of a checkpoint, computed while Megatron's processes write it, and passed on with its place.

Those processes give torch's `WriteResult` of each chunk back to their rank, and Megatron gathers those of all ranks on
the first one for the index: a subclass of it carries the checksum there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from isal.isal_zlib import crc32
from torch.distributed.checkpoint.storage import WriteResult


@dataclass(frozen=True)
class SummedResult(WriteResult):
    """Where a chunk was written, and the CRC-32 of its bytes."""

    crc32: int


class _SummingStream:
    """A stream of bytes that are only appended."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.crc32 = stream, 0

    def write(self, data: Any) -> int:
        self.crc32 = crc32(data, self.crc32)
        count: int = self._stream.write(data)
        return count

    def tell(self) -> int:
        position: int = self._stream.tell()
        return position

    def flush(self) -> None:
        self._stream.flush()


def summing(write_item: Callable[..., WriteResult]) -> Callable[..., SummedResult]:
    """torch's `_write_item(*transforms, stream, data, item, storage_key, **settings)` with a checksum in its result."""

    @functools.wraps(write_item)  # Megatron looks at its signature
    def write(*arguments: Any, **settings: Any) -> SummedResult:
        *transforms, stream, data, item, storage_key = arguments
        summed = _SummingStream(stream)
        result = write_item(*transforms, summed, data, item, storage_key, **settings)
        return SummedResult(result.index, result.size_in_bytes, result.storage_data, summed.crc32)

    return write


def by_file(results: Iterable[Iterable[WriteResult]]) -> dict[str, dict[int, int]]:
    """Checksums of the chunks of a save by file in `weights/` and offset; `results` are those of all ranks."""
    sums: dict[str, dict[int, int]] = {}
    for result in (each for of_rank in results for each in of_rank):
        place = result.storage_data
        if isinstance(result, SummedResult) and place.length:
            sums.setdefault(place.relative_path, {})[place.offset] = result.crc32
    return sums
