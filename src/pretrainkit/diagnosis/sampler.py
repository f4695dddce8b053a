"""Which of the program's functions the time goes to: the main thread's stack, looked at many times a second."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING

from pretrainkit.diagnosis.loop import own_frames

if TYPE_CHECKING:
    from pretrainkit.diagnosis.phases import PhaseClock

INTERVAL_S = 0.004
TOKENIZER_WORDS = ("tokeniz", "encode")
"""In the name of a function or file: it makes token ids of text."""


class Sampler:
    """Counts (phase, function, is it a tokenizer) while it runs; costs a few microseconds a look."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock, self._thread = clock, threading.get_ident()
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
            frame = sys._current_frames().get(self._thread)
            phase = self._clock.current
            own = own_frames(frame)
            if not own:
                continue
            code = own[-1].f_code
            where = f"{code.co_name} ({code.co_filename}:{own[-1].f_lineno})"
            is_tokenizer = False
            while frame is not None and not is_tokenizer:
                words = f"{frame.f_code.co_filename} {frame.f_code.co_name}".lower()
                words = words.rpartition("/")[2]
                is_tokenizer = any(word in words for word in TOKENIZER_WORDS)
                frame = frame.f_back
            self._counts[phase, where, is_tokenizer] += 1

    def result(self) -> list[dict[str, object]]:
        """The places that were seen most, first."""
        return [
            {"phase": phase, "where": where, "is_tokenizer": is_tokenizer, "count": count}
            for (phase, where, is_tokenizer), count in self._counts.most_common(60)
        ]
