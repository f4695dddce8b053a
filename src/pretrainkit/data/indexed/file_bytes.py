"""Bytes of files at offsets: written, summed and copied."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

COPY_BYTES = 64 << 20
READ_BYTES = 8 << 20
NO_COPY_IN_KERNEL = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """The descriptor of an open file; errors of the system in the block name that file."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        yield descriptor
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
    finally:
        os.close(descriptor)


def write_at(path: Path, offset: int, arrays: list[Any]) -> None:
    """Write contiguous arrays, or bytes, one after the other at an offset of a file, which is made if missing."""
    with opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
        for array in arrays:
            view = memoryview(array).cast("B")
            while len(view):
                count = os.pwrite(descriptor, view, offset)
                offset, view = offset + count, view[count:]


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


def copy_range(source: Path, source_offset: int, target: Path, target_offset: int, num_bytes: int) -> None:
    """Copy bytes from one file to another, which is made if missing.

    With copy_file_range, or by reading where the file system has none.
    """
    with opened(source, os.O_RDONLY) as read, opened(target, os.O_WRONLY | os.O_CREAT) as write:
        while num_bytes:
            try:
                count = os.copy_file_range(read, write, min(num_bytes, COPY_BYTES), source_offset, target_offset)
            except OSError as error:
                if error.errno not in NO_COPY_IN_KERNEL:
                    raise
                count = 0
            if not count:
                data = os.pread(read, min(num_bytes, READ_BYTES), source_offset)
                if not data:
                    raise OSError(errno.EIO, f"{num_bytes} bytes are missing in a file that is being copied")
                count = os.pwrite(write, data, target_offset)
            num_bytes, source_offset, target_offset = num_bytes - count, source_offset + count, target_offset + count
