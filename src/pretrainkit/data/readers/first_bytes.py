"""What a file's first bytes say: how it is compressed, and whether it is something else than its name promises."""

from __future__ import annotations

import io
import re
import stat
from pathlib import Path
from typing import Any

from pretrainkit.data.readers.compressed import DAMAGES, SUFFIXES, opened
from pretrainkit.data.readers.text import BOM
from pretrainkit.errors import RequestError

NUM_BYTES = 512
COMPRESSIONS = {
    "gz": rb"\x1f\x8b",
    "zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    "xz": rb"\xfd7zXZ\0",
    "bz2": rb"BZh",
}
"""How a file begins, as regular expressions. zst: also the frame to be skipped that pzstd begins with."""
OTHER_ARCHIVES = {
    "zip": rb"PK(\x03\x04|\x05\x06)",
    "lz4": rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18",
    "7z": rb"7z\xbc\xaf\x27\x1c",
    "snappy": rb"\xff\x06\0\0sNaPpY",
    "tar": rb"(?s).{257}ustar",
}
POINTERS = {
    "a Git LFS pointer in place of the file": (rb"version https://git-lfs\.github\.com/spec/v1", "git lfs pull"),
    "a git-annex pointer in place of the file": (rb"/annex/objects/", "git annex get"),
}
HTML = re.compile(rb"\s*<(!doctype html|html)[\s>]", re.IGNORECASE)
ARRAY, OBJECT_OVER_LINES = re.compile(rb"\s*\[\s*(\{|$)"), re.compile(rb"\s*\{\s*\n")


def compression_of(path: Path) -> tuple[str, bytes]:
    """The compression of a file, empty for a plain one, and how its content begins, decompressed.

    Raises RequestError for what is no regular file or can't be read, for a file that isn't compressed as its suffix
    promises, for archives of other kinds or inside each other, and for pointers that stand in place of a file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise RequestError(
                "a pipe or a device",
                where=str(path),
                needed="a file: it is read in several places at once, and again when work is continued",
                action="write it to a file first",
            )
        with path.open("rb") as file:
            start = file.read(NUM_BYTES)
    except OSError as error:
        raise RequestError(f"can't be read: {error.strerror}", where=str(path)) from error
    compression = next((name for name, magic in COMPRESSIONS.items() if re.match(magic, start)), "")
    promised = SUFFIXES.get(path.suffix.lower())
    _check_content(path, start)
    if promised and not compression:
        found = f"not {promised}: it begins with {start[:40]!r}" if start else f"empty, which no {promised} is"
        raise RequestError(found, where=str(path), action="copy or download it again; rename it if it is plain text")
    if compression:
        start = _decompressed_start(path, compression)
        _check_content(path, start)
        if inner := next((name for name, magic in COMPRESSIONS.items() if re.match(magic, start)), ""):
            raise RequestError(f"{inner} inside {compression}", where=str(path), action="decompress it once")
    return compression, start.removeprefix(BOM)


def _check_content(path: Path, start: bytes) -> None:
    for found, (pattern, command) in POINTERS.items():
        if re.match(pattern, start):
            raise RequestError(found, where=str(path), action=f"fetch the file itself with `{command}`")
    for kind, pattern in OTHER_ARCHIVES.items():
        if re.match(pattern, start):
            needed = "a plain file, or one in gz, zst, xz or bz2"
            raise RequestError(f"an archive of the kind {kind}", where=str(path), needed=needed, action="unpack it")


def check_json_lines(path: Path, start: bytes) -> None:
    """Raises RequestError for JSON that isn't a record a line."""
    if ARRAY.match(start):
        found, command = "a JSON array", f"jq -c '.[]' {path.name}"
    elif OBJECT_OVER_LINES.match(start):
        found, command = "JSON objects over several lines", f"jq -c . {path.name}"
    else:
        return
    raise RequestError(found, where=str(path), needed="a record a line", action=f"convert it, e.g. with `{command}`")


def _decompressed_start(path: Path, compression: str) -> bytes:
    """Empty for a damaged file, which its reader reports."""
    stream: Any
    try:
        with path.open("rb") as file, opened(io.BufferedReader(file), compression) as stream:
            return stream.read(NUM_BYTES)
    except DAMAGES:
        return b""
