"""Single token shards by name: paths with `{00000..00009}` or `*`, and URLs, which WebDataset opens."""

from __future__ import annotations

import contextlib
import glob
import re
from pathlib import Path
from typing import Any

from pretrainkit.errors import DataError, RequestError

ATTEMPTS = 3
"""To read from a stream."""
READ_BYTES = 1 << 20
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")


def is_url(name: str | Path) -> bool:
    """Whether WebDataset must open it: `https:`, `pipe:`, `gs:` and so on, but not `file:` or a path."""
    return bool(_SCHEME.match(str(name))) and not str(name).startswith("file:")


def names_shards(name: str | Path) -> bool:
    """Whether a name means shards one by one, and not a folder of them."""
    return is_url(name) or str(name).endswith(".tar")


def expand(name: str) -> list[str]:
    """The shards that a name matches, in order. Raises RequestError when there is none."""
    import braceexpand

    names = list(braceexpand.braceexpand(name)) if "{" in name else [name]
    found = []
    for one in names:
        matches = sorted(glob.glob(one)) if "*" in one and not is_url(one) else [one]  # noqa: PTH207
        if not matches:
            raise RequestError("no such shard", where=one)
        found += matches
    return found


def sibling(url: str, suffix: str) -> str:
    """The name of a file next to a shard. Raises DataError when `url` doesn't name a shard."""
    before, tar, after = url.rpartition(".tar")
    if not tar:
        raise DataError("not the name of a shard", where=url, needed="a name with .tar")
    return before + suffix + after


def fetch(url: str) -> bytes:
    """The content of a small file. Raises DataError."""
    from webdataset.gopen import gopen

    try:
        with gopen(url, "rb") as stream:
            content: bytes = stream.read()
            return content
    except Exception as error:  # each URL scheme has its own error types
        raise DataError(
            f"can't be read: {error}", where=url, needed="the record and table next to the shard, under the same name"
        ) from error


class ForwardStream:
    """Reads what is behind a URL from its beginning to its end; it is opened again after an error, and to go back."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stream: Any = None
        self._position = 0

    def read(self, offset: int, num_bytes: int) -> bytes:
        """The bytes from `offset` on. Raises DataError when no attempt gives them all."""
        problem: Exception | None = None
        for _ in range(ATTEMPTS):
            try:
                self._go_to(offset)
                return self._take(num_bytes)
            except Exception as error:  # each URL scheme has its own error types
                problem = error
                self.close()
        raise DataError(f"can't be read: {problem}", where=self._url) from problem

    def _go_to(self, offset: int) -> None:
        from webdataset.gopen import gopen

        if self._position > offset:
            self.close()
        if self._stream is None:
            self._stream, self._position = gopen(self._url, "rb"), 0
        while self._position < offset:
            self._take(min(READ_BYTES, offset - self._position))

    def _take(self, num_bytes: int) -> bytes:
        content: bytes = self._stream.read(num_bytes)
        self._position += len(content)
        if len(content) != num_bytes:
            raise EOFError(f"the stream ends at byte {self._position}")
        return content

    def close(self) -> None:
        """Close the stream; the program behind one that isn't read to its end then ends by SIGPIPE, as it should."""
        stream, self._stream, self._position = self._stream, None, 0
        with contextlib.suppress(Exception):  # the program reports its closed pipe
            if stream is not None:
                stream.close()
