"""Tensors in files: StoredTensor is one of them, ComputedTensor some rows made from several, LazyTensor joins rows.

Most of a conversion moves rows unchanged from one file to another. A block that is in a file is copied in small pieces,
through a buffer that stays in the processor's cache; one that must be cast or gathered is processed in slices.
So conversion is as fast as copying, and its memory doesn't grow with the model.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from pretrainkit.checkpoint.nonfinite import Watch, is_finite

SLICE_BYTES = 32 * 2**20
"""Size of the slices that are cast or gathered; larger ones aren't faster (measured: 16 to 256 MiB alike)."""
COPY_BYTES = 2**20
"""Size of the copy buffer; it fits a core's cache (measured: 256 KiB to 8 MiB alike)."""


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file; its elements are read when they are asked for."""

    path: Path
    offset: int
    """Position of the tensor's storage in the file, bytes."""
    meta: Tensor
    """Shape, strides, dtype and offset in the storage, as a tensor on the meta device."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.meta.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    @property
    def begin(self) -> int:
        """Position of the first element in the file, bytes."""
        return self.offset + int(self.meta.storage_offset()) * self.dtype.itemsize

    def view(self, change: Callable[[Tensor], Tensor]) -> StoredTensor:
        """What `change`, a view such as a slice or a transpose, makes of the tensor; nothing is read."""
        return replace(self, meta=change(self.meta))

    def narrow(self, dim: int, first: int, count: int) -> StoredTensor:
        """As Tensor.narrow."""
        return self.view(lambda tensor: tensor.narrow(dim, first, count))

    def read(self) -> Tensor:
        """The tensor, with its strides: mapped, not read; dropping it unmaps it.

        The mapping is private (copy on write), so the file can't be changed through it.
        """
        if not self.meta.numel():
            return torch.empty(self.shape, dtype=self.dtype)
        steps = zip(self.shape, self.meta.stride(), strict=True)
        num_bytes = (1 + sum((size - 1) * step for size, step in steps)) * self.dtype.itemsize
        skip = self.begin % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), num_bytes + skip, access=mmap.ACCESS_COPY, offset=self.begin - skip)
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=skip)
        if skip % self.dtype.itemsize:
            data = data.clone()  # a view in another dtype needs aligned memory
        return data.view(self.dtype).as_strided(self.shape, self.meta.stride())


@dataclass(frozen=True, eq=False)
class ComputedTensor:
    """Rows that are computed each time they are read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    compute: Callable[[int, int], Tensor]
    """Gives the rows `first` to `first + count`."""
    first: int = 0

    def narrow(self, dim: int, first: int, count: int) -> ComputedTensor:
        """As Tensor.narrow; along rows only."""
        assert dim == 0, dim
        return replace(self, shape=(count, *self.shape[1:]), first=self.first + first)

    def read(self) -> Tensor:
        """The rows."""
        return self.compute(self.first, self.shape[0])


Block: TypeAlias = StoredTensor | ComputedTensor | Tensor


@dataclass(frozen=True)
class LazyTensor:
    """A tensor made of blocks of rows, in files, in memory or computed, and the dtype that it will have."""

    blocks: tuple[Block, ...]
    dtype: torch.dtype
    watch: Watch | None = None
    """Learns of NaN and infinities when they are written."""

    @staticmethod
    def of(*blocks: Block) -> LazyTensor:
        """A tensor of these blocks in their own dtype."""
        return LazyTensor(blocks, blocks[0].dtype)

    @staticmethod
    def joined(parts: Iterable[LazyTensor]) -> LazyTensor:
        """The concatenation of several along the first dimension."""
        parts = list(parts)
        return replace(parts[0], blocks=tuple(block for part in parts for block in part.blocks))

    @staticmethod
    def computed(shape: tuple[int, ...], dtype: torch.dtype, compute: Callable[[int, int], Tensor]) -> LazyTensor:
        """A tensor whose rows `first` to `first + count` are `compute(first, count)`: SLICE_BYTES of them at a time."""
        step = max(1, SLICE_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
        whole = ComputedTensor(shape, dtype, compute)
        return LazyTensor.of(
            *(whole.narrow(0, first, min(step, shape[0] - first)) for first in range(0, shape[0], step))
        )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined tensor."""
        return (sum(block.shape[0] for block in self.blocks), *self.blocks[0].shape[1:])

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """The same values in another dtype; cast when they are written or joined."""
        return replace(self, dtype=dtype)

    def rows(self, first: int, count: int) -> LazyTensor:
        """Rows `first` to `first + count`."""
        blocks, position = [], 0
        for block in self.blocks:
            begin, end = max(first - position, 0), min(first + count - position, block.shape[0])
            if begin < end:
                blocks.append(block.narrow(0, begin, end - begin))
            position += block.shape[0]
        return replace(self, blocks=tuple(blocks))

    def tensor(self) -> Tensor:
        """The joined tensor; memory-mapped, not read, if it is one block of this dtype."""
        tensors = [_tensor(block).to(self.dtype) for block in self.blocks]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def write(self, descriptor: int, offset: int) -> int:
        """Write the elements, row-major, at an offset of an open file; the number of bytes."""
        begin = offset
        with ExitStack() as stack:
            open_once = cache(lambda path: stack.enter_context(path.open("rb", buffering=0)))
            for block in self.blocks:
                size = torch.Size(block.shape).numel() * self.dtype.itemsize
                if isinstance(block, StoredTensor) and block.dtype == self.dtype and block.meta.is_contiguous():
                    pieces = _pieces_of_file(open_once(block.path), block.begin, size)
                else:
                    pieces = _slices(_tensor(block), self.dtype)
                position = offset
                for piece in pieces:
                    if self.watch and not is_finite(piece, self.dtype):  # while it is in the processor's cache
                        self.watch.found = True
                    position += pwrite_all(descriptor, piece, position)
                offset += size
        return offset - begin


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equality of bits: 0 and -0 differ, a NaN equals itself."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)))


def _tensor(block: Block) -> Tensor:
    return block if isinstance(block, Tensor) else block.read()


def _pieces_of_file(source: FileIO, begin: int, size: int) -> Iterator[memoryview]:
    """Bytes of a file in pieces; each is overwritten by the next.

    copy_file_range isn't used: source and target are nearly always aligned differently within a page, and with it
    5.2 GiB took 6.0 to 6.5 s from NeMo instead of 3.0 to 4.5, and 7.0 to 7.1 s to torch instead of 4.6 to 5.3.
    """
    buffer = memoryview(bytearray(min(size, COPY_BYTES)))
    source.seek(begin)
    for done in range(0, size, COPY_BYTES):
        piece = buffer[: size - done]
        filled = 0
        while filled < len(piece):
            count = source.readinto(piece[filled:])
            if not count:
                raise OSError(errno.EIO, "ends within a tensor", str(source.name))
            filled += count
        yield piece


def _slices(tensor: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of a tensor in another dtype, row-major, in slices."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    row_bytes = tensor[0].numel() * dtype.itemsize
    step = max(1, SLICE_BYTES // row_bytes)
    for first in range(0, len(tensor), step):
        part = tensor[first : first + step].to(dtype).contiguous().reshape(-1)
        yield memoryview(part.view(torch.uint8).numpy())


def pwrite_all(descriptor: int, data: memoryview | bytes, offset: int) -> int:
    """Write all of `data` at an offset; the number of bytes."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
    return done
