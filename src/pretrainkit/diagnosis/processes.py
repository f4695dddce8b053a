"""Which processes of the program are measured, and which ones train without being measured, and why."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil

LONGEST_UNWATCHED_S = 10.0
"""So long nothing is measured while a process trains that can't be: then there is no use in waiting."""
LOOK_EVERY_S = 2.0
UNWATCHED = "it doesn't read PYTHONPATH (python -I or -E, another environment), by which the hooks get into it"


class Watch:
    """Looks at the processes of one start again and again."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder, self._pid = folder, pid
        self._looked_s = self._fine_s = time.monotonic()
        self._unwatched: dict[int, str] = {}

    @property
    def unmeasured(self) -> list[str]:
        """What trains and isn't measured, and why: by the processes themselves, and of those that have no hooks."""
        return [*(path.read_text() for path in self._folder.glob("unmeasured_*")), *self._unwatched.values()]

    def has_ended(self) -> bool:
        """Whether every rank has measured all that was asked."""
        ended = [path.name.split("_") for path in self._folder.glob("ended_*")]
        return bool(ended) and len(ended) == int(ended[0][2])

    def progress(self) -> str:
        """What is being measured, or waited for."""
        path = self._folder / "progress"
        return path.read_text(encoding="utf-8") if path.exists() else "waiting for the first steps of the training"

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
        """Find processes that have torch, and no hooks."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self._pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    is_young = time.time() - child.create_time() < LOOK_EVERY_S
                    if is_young or (self._folder / f"python_{child.pid}").exists():
                        continue
                    if "libtorch" in Path(f"/proc/{child.pid}/maps").read_text():
                        words = " ".join(child.cmdline())[:200]
                        self._unwatched[child.pid] = f"process {child.pid} ({words}): {UNWATCHED}"
