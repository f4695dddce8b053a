"""Files with one JSON object a line, which are appended to while others read them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrainkit.logs import get_logger

TAIL_BYTES = 1 << 18

log = get_logger(__name__)


def read_records(path: Path, *, only_tail: bool = False) -> list[dict[str, Any]]:
    """All intact records in order, or those in the last TAIL_BYTES of a long file; none where there is no file.

    The last line may be torn, or still being written, and a power cut may leave zeros anywhere: such lines are skipped.
    """
    if not path.is_file():
        return []
    records = []
    with path.open("rb") as file:
        if only_tail:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        for line in file:
            with contextlib.suppress(ValueError):
                record = json.loads(line) if line.endswith(b"\n") else None
                if isinstance(record, dict):
                    records.append(record)
    return records


class JsonLinesWriter:
    """Appends records, each line in one piece, so that a kill costs at most the line being written.

    A disk that is full costs no record: those that can't be written are kept until they can. Writers of one file wait
    for each other, so that none cuts off what another has written.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("ab", buffering=0)
        self._unwritten: list[bytes] = []
        with self._alone():
            content = path.read_bytes()
            if content and not content.endswith(b"\n"):  # a line that a kill tore would spoil the next one
                self._file.truncate(content.rfind(b"\n") + 1)

    def append(self, record: dict[str, Any]) -> OSError | None:
        """Write a record, after those that could not be written before; the error for which it is kept."""
        self._unwritten.append(json.dumps(record).encode() + b"\n")
        with self._alone():
            end = os.fstat(self._file.fileno()).st_size
            try:
                rest = memoryview(b"".join(self._unwritten))
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:
                os.ftruncate(self._file.fileno(), end)
                if len(self._unwritten) == 1:
                    log.error(
                        "%s can't be written (%s); records are kept until it can", self._path.name, error.strerror
                    )
                return error
        self._unwritten.clear()
        return None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """The only writer in the block, also over NFS; some file systems have no locks."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)
