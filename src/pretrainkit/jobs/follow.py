"""Follows growing log files, as `tail -F` does, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

_INTERVAL_S = 0.2
_BLOCK = 1 << 16


class Follower:
    """Copies what is written to some files to a stream, until the block ends; files may appear later.

    Lines of several files don't mix. Nothing that was written before the block ended is lost.
    """

    def __init__(self, paths: Sequence[Path], stream: BinaryIO) -> None:
        self._paths, self._stream = paths, stream
        self._files: dict[Path, BinaryIO] = {}
        self._rests: dict[Path, bytes] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log follower", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for file in self._files.values():
            file.close()

    def _run(self) -> None:
        try:
            while not self._ended.wait(_INTERVAL_S):
                self._copy(last=False)
            self._copy(last=True)
        except (BrokenPipeError, ValueError):
            return  # the reader of our stream has closed it; the files keep everything

    def _copy(self, *, last: bool) -> None:
        for path in self._paths:
            if path not in self._files:
                if not path.exists():
                    continue
                self._files[path] = path.open("rb")
            while block := self._files[path].read(_BLOCK):
                lines, newline, rest = (self._rests.pop(path, b"") + block).rpartition(b"\n")
                self._stream.write(lines + newline)
                self._rests[path] = rest
            if last and (rest := self._rests.pop(path, b"")):
                self._stream.write(rest + b"\n")
        self._stream.flush()
