"""Bytes of open files at offsets: written, summed and copied."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrainkit.data.indexed.crc import crc32

COPY_BYTES = 64 << 20
READ_BYTES = 8 << 20


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """The descriptor of an open file; errors of the system in the block name that file."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def write_at(descriptor: int, offset: int, data: Any) -> int:
    """Write all of a contiguous array, or of bytes, at an offset; gives the offset after it."""
    view = memoryview(data).cast("B")
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        offset, view = offset + count, view[count:]
    return offset


def checksum(path: Path, offset: int, num_bytes: int, before: int = 0) -> int:
    """The CRC-32 of a part of a file, continued from that of what comes before it; -1 if bytes are missing."""
    if not num_bytes:
        return before
    try:
        with opened(path, os.O_RDONLY) as descriptor:
            while num_bytes and (data := os.pread(descriptor, min(num_bytes, READ_BYTES), offset)):
                before = crc32(data, before)
                offset, num_bytes = offset + len(data), num_bytes - len(data)
    except FileNotFoundError:
        return -1
    return before if not num_bytes else -1


def copy_range(source: int, source_offset: int, target: int, target_offset: int, num_bytes: int) -> None:
    """Copy bytes between open files with copy_file_range, or by reading where the file system has none."""
    in_kernel = hasattr(os, "copy_file_range")
    while num_bytes:
        count = 0
        if in_kernel:
            try:
                size = min(num_bytes, COPY_BYTES)
                count = os.copy_file_range(source, target, size, source_offset, target_offset)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
                    raise
            in_kernel = count > 0
        if not count:
            data = os.pread(source, min(num_bytes, READ_BYTES), source_offset)
            if not data:
                raise OSError(errno.EIO, f"{num_bytes} bytes are missing in a file that is being copied")
            count = os.pwrite(target, data, target_offset)
        num_bytes, source_offset, target_offset = num_bytes - count, source_offset + count, target_offset + count
