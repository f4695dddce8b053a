"""Which of the program's functions the time goes to: the main thread's stack, looked at many times a second."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from pretrainkit.diagnosis.observe.phases import PhaseClock

INTERVAL_S = 0.004
TOKENIZER_WORDS = ("tokeniz", "encode")
"""In the name of a function or file: it makes token ids of text."""
_LIBRARIES = ("<", *map(sysconfig.get_path, ("stdlib", "platstdlib")), str(Path(__file__).parents[2]))
"""Python and this project; installed packages are in site-packages or dist-packages."""


def frames_of(frame: FrameType | None) -> list[FrameType]:
    """A stack, outermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def own_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of the user's program on a stack, outermost first."""
    return [item for item in frames_of(frame) if not _is_library(item.f_code.co_filename)]


def _is_library(path: str) -> bool:
    return path.startswith(_LIBRARIES) or "-packages/" in path


class Sampler:
    """Counts (phase, function, is it a tokenizer) of this thread while it runs; a look costs some microseconds."""

    def __init__(self, clock: PhaseClock, *, below: int = 0) -> None:
        """`below`: look only at what so many frames of the user's program have called."""
        self._below, self._clock, self._thread = below, clock, threading.get_ident()
        self._counts: Counter[tuple[str, str, bool]] = Counter()
        self._ended = threading.Event()
        self._looking = threading.Thread(target=self._look, name="diagnosis sampler", daemon=True)

    def __enter__(self) -> Sampler:
        # Python code keeps the interpreter for so long before another thread gets a look.
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(INTERVAL_S / 10)
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._looking.join()
        sys.setswitchinterval(self._switch_interval_s)

    def _look(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            frame, phase = sys._current_frames().get(self._thread), self._clock.current
            if own := own_frames(frame)[self._below :]:
                names = (f"{Path(item.f_code.co_filename).name} {item.f_code.co_name}" for item in frames_of(frame))
                is_tokenizer = any(word in name.lower() for name in names for word in TOKENIZER_WORDS)
                code = own[-1].f_code
                where = f"{code.co_name} ({code.co_filename}:{own[-1].f_lineno})"
                self._counts[phase, where, is_tokenizer] += 1

    def result(self) -> list[dict[str, Any]]:
        """The places that were seen most, first."""
        return [
            {"phase": phase, "where": where, "is_tokenizer": is_tokenizer, "count": count}
            for (phase, where, is_tokenizer), count in self._counts.most_common(60)
        ]
