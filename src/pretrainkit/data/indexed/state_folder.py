"""The unfinished state of a preprocessing run, on disk: what was asked, and what is done.

    <prefix>.partial/
      request.json          what was asked; another request never continues this state
      lock                  held while a process works here
      journal.jsonl         a line per chunk that is in its place or in part files, and per finished output
      <item>-<block>.*.part encoded chunks whose place is not known yet (see `chunk`)
      output-<n>.<key>.bin  outputs as far as they are put together

Nothing is flushed to disk before the end; a state that lost data in a power cut is found by its checksums.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pretrainkit.data.indexed.chunk import Chunk, Column, Order
from pretrainkit.errors import RequestError
from pretrainkit.files import LockHeldError, atomic_file, leftovers, locked, temporary_name, write_json
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
VERSION = 5
"""Of this folder's format. It is part of what was asked, so that a state of another version is not continued."""


@dataclass
class Journal:
    """What a journal says."""

    engine: str = ""
    """The library that had to be taken, when it isn't the default one."""
    num_finished: int = 0
    """Outputs whose files are complete, under temporary or final names."""
    placed: dict[Order, tuple[Chunk, Column]] = field(default_factory=dict)
    """Chunks in their place in the output that is not finished, and the output's rejects up to there."""
    parts: dict[Order, Chunk] = field(default_factory=dict)
    """Chunks that were put into part files."""

    def lines(self) -> Iterator[bytes]:
        """As a file."""
        if self.engine:
            yield _line({"engine": self.engine})
        yield _line({"finished": self.num_finished - 1})
        for chunk, rejects in self.placed.values():
            yield _line({"placed": chunk, "rejects": rejects})
        for chunk in self.parts.values():
            yield _line({"part": chunk})


def _line(entry: dict[str, Any]) -> bytes:
    return orjson.dumps(entry) + b"\n"


def _read_journal(path: Path) -> Journal:
    journal = Journal()
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # the line at which it was killed
        if "placed" in entry:
            chunk = Chunk.from_json(entry["placed"])
            journal.placed[chunk.order] = chunk, Column(**entry["rejects"])
        elif "part" in entry:
            chunk = Chunk.from_json(entry["part"])
            journal.parts[chunk.order] = chunk
        elif "finished" in entry:
            journal.num_finished, journal.placed = entry["finished"] + 1, {}
        else:
            journal.engine = entry["engine"]
    return journal


class StateFolder:
    """An open state folder, held by this process alone. `begin` comes before any `add_`."""

    def __init__(self, path: Path, request: dict[str, Any], *, resume: bool) -> None:
        """Raises RequestError when another process works in it."""
        self.path, self._request, self._journal_path = path, request, path / "journal.jsonl"
        path.mkdir(parents=True, exist_ok=True)
        self._stack = ExitStack()
        try:
            self._stack.enter_context(locked(path / "lock"))
        except LockHeldError as error:
            raise RequestError(
                f"another process is writing this output now: {error.holder}",
                where=str(path),
                action="wait for it, or give another --output-prefix",
            ) from None
        self.is_resumed = resume and _is_of(path, request)
        if self.is_resumed:
            self.journal = _read_journal(self._journal_path)
            """What was done before."""
            return
        if self._journal_path.exists():
            LOGGER.warning(
                "%s holds unfinished work of another request or version, or is not to be continued: dropped", path
            )
        self.reset("")

    def reset(self, engine: str) -> None:
        """Forget everything, and begin again with this library; empty: the default one."""
        for entry in self.path.iterdir():
            if entry.name != "lock":
                entry.unlink()
        self.journal = Journal(engine)
        self.begin()

    def begin(self) -> None:
        """Write down what the journal says now, and append to it from here on."""
        write_json(self.path / "request.json", {**self._request, "state": VERSION})
        with atomic_file(self._journal_path) as temporary, temporary.open("wb") as file:
            file.writelines(self.journal.lines())
        self._file = self._stack.enter_context(self._journal_path.open("ab", buffering=0))

    def _append(self, entry: dict[str, Any]) -> None:
        data = _line(entry)
        if self._file.write(data) != len(data):
            raise OSError(28, "No space left on device", str(self.path))

    def add_part(self, chunk: Chunk) -> None:
        """A chunk is in part files."""
        self._append({"part": chunk})

    def add_placed(self, chunk: Chunk, rejects: Column) -> None:
        """A chunk is in its place, and so are the rejects of its output up to there."""
        self._append({"placed": chunk, "rejects": rejects})

    def add_finished(self, output: int) -> None:
        """An output's files are complete and flushed."""
        self._append({"finished": output})

    def close(self) -> None:
        """Release the lock; the state stays, to be continued."""
        self._stack.close()

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
    return _read_journal(path / "journal.jsonl").num_finished if _is_of(path, request) else 0


def _is_of(path: Path, request: dict[str, Any]) -> bool:
    """Whether a state folder holds work of this request."""
    try:
        earlier = orjson.loads((path / "request.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return False
    wanted = orjson.loads(orjson.dumps({**request, "state": VERSION}))
    # What was done while every bad record stopped the run had none, so it suits any policy.
    on_error = earlier.pop("on_error", None), wanted.pop("on_error", None)
    return earlier == wanted and on_error[0] in (on_error[1], "stop")
