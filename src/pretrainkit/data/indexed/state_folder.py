"""The unfinished state of a preprocessing run, on disk: what was asked, and what is done.

    <prefix>.partial/
      request.json          what was asked; another request never continues this state
      lock                  held while a process works here
      journal.jsonl         a line per chunk that is in its place, and per finished output
      <item>-<block>.part   encoded chunks whose place is not known yet (see `part_file`)
      output-<n>.<key>.bin  outputs as far as they are put together

Nothing is flushed to disk before the end; a state that lost data in a power cut is found by its checksums.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pretrainkit.data.indexed.encoded_chunk import EncodedChunk
from pretrainkit.errors import RequestError
from pretrainkit.files import LockHeldError, leftovers, locked, temporary_name, write_json
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
VERSION = 2
"""Of this folder's format. It is part of what was asked, so that a state of another version is not continued."""


@dataclass(frozen=True)
class PlacedChunk:
    """A chunk in its place in the output."""

    chunk: EncodedChunk
    rejects: tuple[int, int]
    """Bytes and CRC-32 of the output's rejects up to here."""
    journal_bytes: int
    """The journal's length before this line."""


@dataclass
class Journal:
    """What a journal says."""

    placed: list[PlacedChunk] = field(default_factory=list)
    """Chunks of the output that is not finished, in order."""
    num_finished: int = 0
    """Outputs whose files are complete, under temporary or final names."""
    engine: str = ""
    """The library that had to be taken, when it isn't the default one."""


class StateFolder:
    """An open state folder, held by this process alone."""

    def __init__(self, path: Path, request: dict[str, Any], *, resume: bool) -> None:
        """Raises RequestError when another process works in it."""
        self.path = path
        request = {**request, "state": VERSION}
        path.mkdir(parents=True, exist_ok=True)
        self._lock = ExitStack()
        try:
            self._lock.enter_context(locked(path / "lock"))
        except LockHeldError as error:
            raise RequestError(
                f"another process is writing this output now: {error.holder}",
                where=str(path),
                action="wait for it, or give another --output-prefix",
            ) from None
        self._journal_path = path / "journal.jsonl"
        self._request = request
        self.is_resumed = resume and _is_of(path, request)
        if not self.is_resumed:
            if self._journal_path.exists():
                LOGGER.warning(
                    "%s holds unfinished work of another request or version, or is not to be continued: dropped", path
                )
            self._clear()
        self._open()

    def _clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.name != "lock":
                entry.unlink()

    def _open(self) -> None:
        self.journal = _read(self._journal_path)
        write_json(self.path / "request.json", self._request)
        self._file = os.open(self._journal_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(self._file, b"\n")  # ends the line at which an earlier process was killed

    def reset(self, engine: str) -> None:
        """Forget everything, and begin again with this library."""
        os.close(self._file)
        self._clear()
        self._open()
        self._append({"engine": engine})

    def truncate(self, placed: PlacedChunk) -> None:
        """Forget a chunk, whose data is damaged, and all later lines."""
        os.ftruncate(self._file, placed.journal_bytes)

    def _append(self, entry: dict[str, Any]) -> None:
        data = orjson.dumps(entry) + b"\n"
        if os.write(self._file, data) != len(data):
            raise OSError(28, "No space left on device", str(self.path))

    def add_placed(self, chunk: EncodedChunk, rejects: tuple[int, int]) -> None:
        """A chunk is in its place."""
        self._append({"placed": chunk.to_json(), "rejects": rejects})

    def add_finished(self, output: int) -> None:
        """An output's files are complete and flushed."""
        self._append({"finished": output})

    def close(self) -> None:
        """Release the lock; the state stays, to be continued."""
        os.close(self._file)
        self._lock.close()

    def remove(self) -> None:
        """The work is done: remove the state. A kill in between leaves a name that says so (see `remove_finished`)."""
        finished = temporary_name(self.path)
        shutil.rmtree(finished, ignore_errors=True)
        self.path.rename(finished)
        self.close()  # first: NFS keeps a folder in which a removed file is open
        shutil.rmtree(finished, ignore_errors=True)


def remove_finished(path: Path) -> bool:
    """Remove what is left of states whose processes were killed after their work was done; whether there was any."""
    found = leftovers(path)
    for finished in found:
        shutil.rmtree(finished, ignore_errors=True)
    return bool(found)


def num_finished_outputs(path: Path, request: dict[str, Any]) -> int:
    """Outputs that unfinished work of this very request has completed; changes nothing."""
    return _read(path / "journal.jsonl").num_finished if _is_of(path, {**request, "state": VERSION}) else 0


def _is_of(path: Path, request: dict[str, Any]) -> bool:
    """Whether a state folder holds work of this request."""
    try:
        earlier = orjson.loads((path / "request.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return False
    wanted = orjson.loads(orjson.dumps(request))
    # What was done while every bad record stopped the run had none, so it suits any policy.
    on_error = earlier.pop("on_error", None), wanted.pop("on_error", None)
    return earlier == wanted and on_error[0] in (on_error[1], "stop")


def _read(path: Path) -> Journal:
    journal, position = Journal(), 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            entry = {}  # the line at which it was killed
        if "placed" in entry:
            chunk, (rejects_bytes, rejects_crc32) = EncodedChunk.from_json(entry["placed"]), entry["rejects"]
            journal.placed.append(PlacedChunk(chunk, (rejects_bytes, rejects_crc32), position))
        elif "finished" in entry:
            journal.num_finished, journal.placed = entry["finished"] + 1, []
        elif "engine" in entry:
            journal.engine = entry["engine"]
        position += len(line)
    return journal
