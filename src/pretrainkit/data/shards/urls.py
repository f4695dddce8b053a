"""Names of single token shards: paths with `{00000..00009}` or `*`, and URLs that WebDataset opens."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from pretrainkit.errors import DataError, RequestError

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
