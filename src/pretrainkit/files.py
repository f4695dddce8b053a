"""Atomic writes of files and folders, the file lock, and the loop that polls for what other processes write.

Everything is written under a temporary name next to its final one, flushed to disk, and renamed; so a
kill, a full disk or a power cut leaves either the old state or the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from pretrainkit.errors import RequestError
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
T = TypeVar("T")

TEMPORARY_MARK = ".tmp-"
"""Part of every temporary name, so that leftovers of a killed process can be recognised."""
WINDOW_BYTES = 4096
_MIN_WINDOWS, _WINDOWS_AT_ONCE, _SAMPLE_THREADS = 4, 32, 16
_OLD = "-old"
"""Ends the temporary name of what is being replaced."""


def check_utf8(path: Path) -> None:
    """Raises RequestError for a name that no record could hold."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        name = str(path).encode(errors="backslashreplace").decode()
        raise RequestError("its name is not UTF-8", where=name, action="rename it, e.g. with convmv") from None


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(found for found in (path, *path.absolute().parents) if found.exists())


def fsync_path(path: Path) -> None:
    """Flush a file's or a folder's own entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LockHeldError(Exception):
    """Another process holds a lock; `holder` names it as far as the lock file does."""

    def __init__(self, path: Path, holder: str) -> None:
        super().__init__(f"{path} is locked by {holder}")
        self.path, self.holder = path, holder


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold an exclusive lock on the file `path` (created if missing) while the block runs.

    The kernel releases the lock when the process dies, however it dies. Some cluster file systems keep such locks on
    one node only. The lock file says which process took it last, and stays there: removing it would let two processes
    lock two files of one name.

    Args:
        path: the lock file, in an existing folder.
        wait: wait while another process holds the lock.

    Yields:
        True with the lock held; False, after a warning, where the file system has no locks.

    Raises:
        LockHeldError: another process holds the lock, and `wait` is False.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        is_held = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            raise LockHeldError(path, holder or "an unknown process") from None
        except OSError as error:
            LOGGER.warning("%s: no file locks here (%s): don't start this twice at once", path, error.strerror)
            is_held = False
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield is_held
    finally:
        os.close(descriptor)


def wait_until(condition: Callable[[], T], *, timeout_s: float = math.inf, poll_s: float = 0.2) -> T:
    """Call `condition` every `poll_s` seconds until it gives something true, at most for `timeout_s`.

    Gives what `condition` gave last, so a false value means a timeout.
    """
    end_s = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < end_s:
        time.sleep(poll_s)
    return found


def temporary_name(final: Path) -> Path:
    """The temporary name next to `final` that this process, on this host of a shared disk, uses."""
    return final.with_name(f"{final.name}{TEMPORARY_MARK}{socket.gethostname()}-{os.getpid()}")


def commit(temporary: Path, final: Path) -> None:
    """Give a finished, flushed file or folder its final name, and make the renaming itself durable."""
    temporary.replace(final)
    fsync_path(final.parent)


def commit_all(moves: Sequence[tuple[Path, Path]], stale: Sequence[Path] = ()) -> None:
    """Give finished, flushed files their final names in order, all of them, or after an error none.

    The last file marks the set as complete: it is there only with all others. What has these names now, and what is
    `stale`, is moved aside, and comes back after an error. After a kill another call with the same arguments goes on.
    """
    done: list[tuple[Path, Path]] = []

    def move(source: Path, target: Path) -> None:
        source.replace(target)
        done.append((source, target))

    finals = [final for _, final in moves]
    try:
        if moves[0][0].exists():  # otherwise a killed process got past this, and what is there is new
            for final in (*reversed(finals), *stale):
                if final.exists():
                    move(final, _aside(final))
        for temporary, final in moves:
            if final == finals[-1]:
                _fsync_parents(finals)
            if temporary.exists():
                final.parent.mkdir(parents=True, exist_ok=True)
                move(temporary, final)
        _fsync_parents(finals)
    except OSError:
        for source, target in reversed(done):
            with contextlib.suppress(OSError):
                target.replace(source)
        raise
    for final in (*finals, *stale):
        for old in leftovers(final):
            if old.name.endswith(_OLD):
                old.unlink(missing_ok=True)


def _aside(final: Path) -> Path:
    return final.with_name(f"{temporary_name(final).name}{_OLD}")


def _fsync_parents(paths: Sequence[Path]) -> None:
    for folder in {path.parent for path in paths}:
        if folder.exists():
            fsync_path(folder)


@contextmanager
def atomic_file(final: Path) -> Iterator[Path]:
    """Yield a temporary path to write; it becomes `final` when the block ends without an error."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(final)
    try:
        yield temporary
        fsync_path(temporary)
        commit(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def staging_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `final`, which is removed when the block ends."""
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(final)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def atomic_folder(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder to fill; it becomes `final` when the block ends without an error.

    `final` must not exist, or be an empty folder. With `replace` it may be filled: the old folder is moved away
    when the new one is complete and flushed, just before that takes its name.
    """
    old = _aside(final)
    try:
        with staging_folder(final) as temporary:
            yield temporary
            for path in sorted(temporary.rglob("*")):
                fsync_path(path)
            fsync_path(temporary)
            if replace and final.is_dir():
                final.replace(old)
            commit(temporary, final)
    finally:
        if old.exists() and not final.exists():
            old.replace(final)
        shutil.rmtree(old, ignore_errors=True)


def leftovers(final: Path) -> list[Path]:
    """Temporary files and folders next to `final`, of killed or of running processes."""
    return sorted(final.parent.glob(f"{glob.escape(final.name)}{TEMPORARY_MARK}*"))


def owner_of(leftover: Path) -> int | None:
    """The process of this host that made a temporary file or folder; None for other hosts' and unknown ones."""
    host, _, process = leftover.name.rpartition(TEMPORARY_MARK)[2].removesuffix(_OLD).rpartition("-")
    return int(process) if host == socket.gethostname() and process.isdecimal() else None


def remove_leftovers(final: Path) -> list[Path]:
    """Remove what killed processes of this host left next to `final`; gives what others left or still write."""
    rest = []
    for path in leftovers(final):
        process = owner_of(path)
        if process is None or psutil.pid_exists(process):
            rest.append(path)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return rest


def link_or_copy(source: str, target: str) -> None:
    """Make `target` a hard link of `source`, or a copy where the file system has no links between the two."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically, keys in the order given."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file, or none with an object."""
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def hash_file(path: Path, digest: Any = "sha256") -> str:
    """The hash of a file's bytes, in hex; `digest` is hashlib's name of it, or a function that makes a hash object."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, digest).hexdigest()


def hash_samples(ranges: Sequence[tuple[Path, int, int]], *, num_windows: int) -> str:
    """A hash of windows of WINDOW_BYTES, evenly spaced over byte ranges (path, begin, end) of files.

    Each range has the same number of windows, at least _MIN_WINDOWS; a smaller one is read whole. `changed` bytes in a
    row are seen with probability n * (changed + WINDOW_BYTES) / size in a range of n windows.
    """
    each = max(_MIN_WINDOWS, num_windows // max(1, len(ranges)))

    def read(task: tuple[Path, list[tuple[int, int]]]) -> bytes:
        path, places = task
        with path.open("rb", buffering=0) as file:
            return b"".join(os.pread(file.fileno(), size, offset) for offset, size in places)

    def tasks() -> Iterator[tuple[Path, list[tuple[int, int]]]]:
        for path, begin, end in ranges:
            last = end - begin - WINDOW_BYTES
            places = [(begin + last * number // (each - 1), WINDOW_BYTES) for number in range(each)]
            if end - begin <= each * WINDOW_BYTES:
                places = [(begin, end - begin)]
            for first in range(0, len(places), _WINDOWS_AT_ONCE):
                yield path, places[first : first + _WINDOWS_AT_ONCE]

    digest = hashlib.sha256()
    with ThreadPoolExecutor(_SAMPLE_THREADS) as pool:  # they wait for the file system
        for content in pool.map(read, tasks()):
            digest.update(content)
    return digest.hexdigest()


def same_fingerprint(one: str | None, other: str | None) -> bool:
    """Whether two fingerprints, `hash+hash_of_samples`, can be of the same content; older ones have no samples."""
    if not one or not other:
        return False
    (facts, _, samples), (other_facts, _, other_samples) = one.partition("+"), other.partition("+")
    return facts == other_facts and (not samples or not other_samples or samples == other_samples)
