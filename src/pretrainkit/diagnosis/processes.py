"""Which processes of the program are measured, and which ones train without being measured, and why.

Every process that imports torch writes down its state; a process that has torch and hasn't can't be watched.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil

from pretrainkit import files
from pretrainkit.diagnosis.observe import states

LONGEST_UNWATCHED_S = 10.0
"""So long nothing is measured while a process trains that can't be: then there is no use in waiting."""
LOOK_EVERY_S = 2.0
REASONS = {
    states.NO_OPTIMIZER: "many backward passes, but no step() of a torch optimizer",
    states.SECOND: "it trains next to one of the same rank, which is measured",
}
UNWATCHED = "it doesn't read PYTHONPATH (python -I or -E, another environment), by which the hooks get into it"


class Watch:
    """Looks at the processes of one start again and again."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder, self._pid = folder, pid
        self._looked_s = self._fine_s = time.monotonic()
        self.unmeasured: dict[int, str] = {}
        """Process -> what it is, and why it isn't measured."""

    def has_ended(self) -> bool:
        """Whether every rank has measured all that was asked."""
        ended = [path.name.split("_")[1:] for path in self._folder.glob("ended_*")]
        return bool(ended) and len(ended) == int(ended[0][1])

    def progress(self) -> str:
        """What is being measured, or waited for."""
        with contextlib.suppress(OSError):
            return (self._folder / "progress").read_text(encoding="utf-8")
        if found := states.read(self._folder):
            return f"waiting for the first steps: {len(found)} processes have imported torch"
        return "waiting for the program to import torch"

    def is_hopeless(self) -> bool:
        """Whether processes train that can't be measured, and none that can. `unmeasured` says which."""
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()
        if not self.unmeasured or (self._folder / "progress").exists():
            self._fine_s = now_s
        return now_s - self._fine_s > LONGEST_UNWATCHED_S

    def _look(self) -> None:
        known = states.read(self._folder)
        hooked = {int(path.name.partition("_")[2]) for path in self._folder.glob("python_*")} | set(known)
        self.unmeasured = {
            pid: f"process {pid} ({state.words}): {REASONS[state.name]}"
            for pid, state in known.items()
            if state.name in REASONS
        }
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    if child.pid not in hooked and "libtorch" in Path(f"/proc/{child.pid}/maps").read_text():
                        self._unwatched(child)

    def _unwatched(self, process: psutil.Process) -> None:
        if time.time() - process.create_time() > LOOK_EVERY_S:
            words = " ".join(process.cmdline())[:200]
            self.unmeasured.setdefault(process.pid, f"process {process.pid} ({words}): {UNWATCHED}")


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """What ranks have written, by rank."""
    return sorted(map(files.read_json, folder.glob("rank_*.json")), key=lambda rank: int(rank["rank"]))
