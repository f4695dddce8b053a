"""Tensors in files: StoredTensor is one of them, LazyTensor joins rows of several without reading them.

Most of a conversion moves rows unchanged from one file to another. A block that is in a file is copied in small pieces,
through a buffer that stays in the processor's cache; one that must be cast or gathered is processed in slices.
So conversion is as fast as copying, and its memory doesn't grow with the model.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

SLICE_BYTES = 32 * 2**20
"""Size of the slices that are cast or gathered; larger ones aren't faster (measured: 16 to 256 MiB alike)."""
COPY_BYTES = 2**20
"""Size of the copy buffer; it fits a core's cache (measured: 256 KiB to 8 MiB alike)."""


def map_bytes(path: Path, offset: int, num_bytes: int) -> torch.Tensor:
    """`num_bytes` of a file as a uint8 tensor that is mapped, not read; dropping the tensor unmaps it.

    The mapping is private (copy on write), so the file can't be changed through it.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    skip = offset % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), num_bytes + skip, access=mmap.ACCESS_COPY, offset=offset - skip)
    mapped.madvise(mmap.MADV_SEQUENTIAL)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=skip)


def map_tensor(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor at a byte offset of a file, mapped."""
    numel = torch.Size(shape).numel()
    data = map_bytes(path, offset, numel * dtype.itemsize)
    if offset % dtype.itemsize:
        data = data.clone()  # a view in another dtype needs aligned memory
    return data.view(dtype).view(shape)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; its elements are read when they are asked for."""

    path: Path
    offset: int
    """Position of the first element in the file, bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def contiguous(path: Path, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensor:
        """A row-major tensor."""
        return StoredTensor(path, offset, dtype, shape, _row_major(shape))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are row-major without gaps."""
        return self.stride == _row_major(self.shape) or 0 in self.shape

    @property
    def num_bytes(self) -> int:
        """Size of the elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, shape: tuple[int, ...]) -> StoredTensor:
        """The same elements in another shape; the tensor must be contiguous."""
        assert self.is_contiguous and torch.Size(shape).numel() == torch.Size(self.shape).numel()
        return StoredTensor.contiguous(self.path, self.offset, self.dtype, shape)

    def read(self) -> torch.Tensor:
        """The tensor, memory-mapped, with the strides that it was saved with."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        flat = map_tensor(self.path, self.offset, (last + 1,), self.dtype)
        return flat.as_strided(self.shape, self.stride)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, steps = 1, []
    for size in reversed(shape):
        steps.append(stride)
        stride *= size
    return tuple(reversed(steps))


Block: TypeAlias = StoredTensor | Tensor


@dataclass(frozen=True)
class LazyTensor:
    """A tensor made of blocks of rows, in files or in memory, and the dtype that it will have."""

    blocks: tuple[Block, ...]
    dtype: torch.dtype

    @staticmethod
    def of(*blocks: Block) -> LazyTensor:
        """A tensor of these blocks in their own dtype."""
        return LazyTensor(blocks, blocks[0].dtype)

    @staticmethod
    def joined(parts: Iterable[LazyTensor]) -> LazyTensor:
        """The concatenation of several along the first dimension."""
        parts = list(parts)
        return LazyTensor(tuple(block for part in parts for block in part.blocks), parts[0].dtype)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the joined tensor."""
        return (sum(block.shape[0] for block in self.blocks), *self.blocks[0].shape[1:])

    @property
    def num_bytes(self) -> int:
        """Size of the joined tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def to(self, dtype: torch.dtype) -> LazyTensor:
        """The same values in another dtype; cast when they are written or joined."""
        return replace(self, dtype=dtype)

    def rows(self, first: int, count: int) -> LazyTensor:
        """Rows `first` to `first + count`."""
        blocks, position = [], 0
        for block in self.blocks:
            begin, end = max(first - position, 0), min(first + count - position, block.shape[0])
            if begin < end:
                blocks.append(_block_rows(block, begin, end - begin))
            position += block.shape[0]
        return LazyTensor(tuple(blocks), self.dtype)

    def tensor(self) -> Tensor:
        """The joined tensor; memory-mapped, not read, if it is one block of this dtype."""
        tensors = [_tensor(block).to(self.dtype) for block in self.blocks]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def write(self, descriptor: int, offset: int) -> None:
        """Write the elements, row-major, at an offset of an open file."""
        for block in self.blocks:
            size = torch.Size(block.shape).numel() * self.dtype.itemsize
            is_unchanged = isinstance(block, StoredTensor) and block.is_contiguous and block.dtype == self.dtype
            if is_unchanged:
                _copy_range(block, descriptor, offset, size)
            else:
                _write_slices(_tensor(block), self.dtype, descriptor, offset)
            offset += size


def _tensor(block: Block) -> Tensor:
    return block.read() if isinstance(block, StoredTensor) else block


def _block_rows(block: Block, first: int, count: int) -> Block:
    if isinstance(block, Tensor):
        return block.narrow(0, first, count)
    skipped = first * block.stride[0] * block.dtype.itemsize
    return replace(block, offset=block.offset + skipped, shape=(count, *block.shape[1:]))


def _copy_range(block: StoredTensor, descriptor: int, offset: int, size: int) -> None:
    """Copy a block's bytes from file to file.

    copy_file_range isn't used: source and target are nearly always aligned differently within a page, and with it
    5.2 GiB took 6.0 to 6.5 s from NeMo instead of 3.0 to 4.5, and 7.0 to 7.1 s to torch instead of 4.6 to 5.3.
    """
    buffer = memoryview(bytearray(min(size, COPY_BYTES)))
    source = os.open(block.path, os.O_RDONLY)
    try:
        for done in range(0, size, COPY_BYTES):
            piece = buffer[: size - done]
            if _read_all(source, piece, block.offset + done) < len(piece):
                raise OSError(errno.EIO, "ends within a tensor", str(block.path))
            pwrite_all(descriptor, piece, offset + done)
    finally:
        os.close(source)


def _write_slices(tensor: Tensor, dtype: torch.dtype, descriptor: int, offset: int) -> None:
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    row_bytes = tensor[0].numel() * dtype.itemsize
    step = max(1, SLICE_BYTES // row_bytes)
    for first in range(0, len(tensor), step):
        part = tensor[first : first + step].to(dtype).contiguous().reshape(-1)
        offset += pwrite_all(descriptor, memoryview(part.view(torch.uint8).numpy()), offset)


def _read_all(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from an offset; the number of bytes, less than its length at the end of the file."""
    done = 0
    while done < len(buffer) and (count := os.preadv(descriptor, [buffer[done:]], offset + done)):
        done += count
    return done


def pwrite_all(descriptor: int, data: memoryview | bytes, offset: int) -> int:
    """Write all of `data` at an offset; the number of bytes."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
    return done


def tensors(values: Sequence[LazyTensor]) -> list[Tensor]:
    """Each value as one tensor."""
    return [value.tensor() for value in values]
