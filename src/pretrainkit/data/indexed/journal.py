"""The unfinished state of a preprocessing run, on disk: what was asked, and what is done.

    <prefix>.partial/
      request.json          what was asked; another request never continues this state
      lock                  held while a process works here
      journal.jsonl         a line per finished chunk, end of a stream, move and commit
      <part>.<key>.tokens   what workers wrote (see `parts`)
      output-<n>.<key>.bin  outputs as far as they are put together

Nothing is flushed to disk before the end; a state that lost data in a power cut is found by its checksums.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pretrainkit.data.indexed.results import ChunkResult
from pretrainkit.errors import RequestError
from pretrainkit.files import leftovers, temporary_name, write_json
from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)
Order = tuple[int, int]


@dataclass
class State:
    """What a journal says."""

    results: dict[Order, ChunkResult] = field(default_factory=dict)
    ends: dict[int, tuple[int, list[str]]] = field(default_factory=dict)
    """By stream unit: number of blocks, digests of its pieces."""
    moved: list[Order] = field(default_factory=list)
    """Chunks in their place in the current output, in order."""
    rejects: tuple[int, int] = (0, 0)
    """Bytes and CRC-32 of the current output's rejects."""
    finished: int = 0
    """Outputs whose files are complete under temporary names."""
    committed: int = 0
    """Outputs that have their final names."""
    engine: str = ""
    """The library that had to be taken, when it isn't the one of choice."""


def finished_outputs(folder: Path, request: dict[str, Any]) -> int:
    """Outputs that unfinished work of this very request has completed; changes nothing."""
    path = folder / "journal.jsonl"
    return _read(path).finished if path.exists() and _same_request(folder / "request.json", request) else 0


class Journal:
    """An open state folder, held by this process alone."""

    def __init__(self, folder: Path, request: dict[str, Any], *, resume: bool) -> None:
        self.folder = folder
        self.state = State()
        self.is_resumed = False
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._hold()
        path = folder / "journal.jsonl"
        if resume and path.exists() and _same_request(folder / "request.json", request):
            self.state = _read(path)
            self.is_resumed = True
        else:
            if path.exists():
                LOGGER.warning("%s holds unfinished work of another request or is not to be continued: dropped", folder)
            self.clear()
        write_json(folder / "request.json", request)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.write(self._file, b"\n")  # ends the line at which an earlier process was killed
        self.session = len(list(folder.glob("session-*")))
        (folder / f"session-{self.session}").touch()

    def _hold(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(
                "another process is writing this output now",
                where=str(self.folder),
                action="wait for it, or give another --output-prefix",
            ) from None
        except OSError as error:
            LOGGER.warning("%s: no locks on this file system (%s)", self.folder, error.strerror)

    def clear(self) -> None:
        """Forget everything."""
        self.state = State()
        for path in self.folder.iterdir():
            if path.name != "lock":
                path.unlink()

    def reset(self, request: dict[str, Any]) -> None:
        """Forget everything, and begin for this request."""
        self.clear()
        write_json(self.folder / "request.json", request)
        os.close(self._file)
        self._file = os.open(
            self.folder / "journal.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def _append(self, entry: dict[str, Any]) -> None:
        data = orjson.dumps(entry) + b"\n"
        if os.write(self._file, data) != len(data):
            raise OSError(28, "No space left on device", str(self.folder))

    def add_result(self, result: ChunkResult) -> None:
        """A chunk is encoded."""
        self._append({"result": result.to_json()})

    def add_end(self, unit: int, num_blocks: int, digests: list[str]) -> None:
        """A stream was read to its end."""
        self._append({"end": unit, "blocks": num_blocks, "digests": digests})

    def add_moves(self, orders: list[Order], rejects: tuple[int, int]) -> None:
        """Chunks are in their place."""
        self._append({"moved": orders, "rejects": rejects})

    def add_finished(self, output: int) -> None:
        """An output's files are complete and flushed."""
        self._append({"finished": output})

    def add_committed(self, output: int) -> None:
        """An output has its final names."""
        self._append({"committed": output})

    def add_engine(self, name: str) -> None:
        """This library has to encode from here on."""
        self._append({"engine": name})

    def close(self) -> None:
        """Let go; the state stays, to be continued."""
        os.close(self._file)
        os.close(self._lock)

    def remove(self) -> None:
        """The work is done: remove the state. What a kill leaves here is known by its name as done."""
        done = temporary_name(self.folder)
        shutil.rmtree(done, ignore_errors=True)
        self.folder.rename(done)
        self.close()  # first: NFS keeps a folder in which a removed file is open
        _remove_done(done)


def clear_done(folder: Path) -> bool:
    """Remove what is left of states whose processes were killed after their work was done; whether there was any."""
    found = leftovers(folder)
    for done in found:
        _remove_done(done)
    return bool(found)


def _remove_done(done: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # two processes may clear it at once
        for path in done.iterdir():
            path.unlink(missing_ok=True)
        done.rmdir()


def _same_request(path: Path, request: dict[str, Any]) -> bool:
    try:
        earlier = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return False
    wanted = orjson.loads(orjson.dumps(request))
    # What was done while every bad record stopped the run had none, so it suits any policy.
    on_error = earlier.pop("on_error", None), wanted.pop("on_error", None)
    return earlier == wanted and (on_error[0] == on_error[1] or on_error[0] == "stop")


def _read(path: Path) -> State:
    state = State()
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # the line at which it was killed
        if "result" in entry:
            result = ChunkResult.from_json(entry["result"])
            state.results[result.order] = result
        elif "end" in entry:
            state.ends[entry["end"]] = entry["blocks"], entry["digests"]
        elif "moved" in entry:
            state.moved += [(unit, block) for unit, block in entry["moved"]]
            state.rejects = entry["rejects"][0], entry["rejects"][1]
        elif "finished" in entry:
            state.finished = entry["finished"] + 1
            state.moved, state.rejects = [], (0, 0)
        elif "engine" in entry:
            state.engine = entry["engine"]
        elif "committed" in entry:
            state.committed = entry["committed"] + 1
    return state
