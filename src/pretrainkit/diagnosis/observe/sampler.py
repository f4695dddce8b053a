"""Which of the program's functions the time goes to: the main thread's stack, looked at many times a second."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from pretrainkit.diagnosis.observe.loop import is_library
from pretrainkit.diagnosis.observe.phases import DATA, PhaseClock
from pretrainkit.diagnosis.spec import read_spec

INTERVAL_S = 0.004
TOKENIZER_WORDS = ("tokeniz", "encode")
"""In the name of a function or file: it makes token ids of text."""
WRITTEN_EVERY_S = 0.5
"""Workers of a loader are ended without notice, so what was seen is written again and again."""


class Sampler:
    """Counts (phase, function, is it a tokenizer) while it runs; costs a few microseconds a look."""

    def __init__(self, clock: PhaseClock, *, above: CodeType | None = None, path: Path | None = None) -> None:
        """Look at this thread; with `above` only at what runs above a function, with `path` write down the counts."""
        self._clock, self._thread, self._above, self._path = clock, threading.get_ident(), above, path
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
        written_s = time.monotonic()
        while not self._ended.wait(INTERVAL_S):
            self._count(sys._current_frames().get(self._thread), self._clock.current)
            if self._path and time.monotonic() - written_s > WRITTEN_EVERY_S:
                temporary = self._path.with_suffix(".tmp")
                temporary.write_text(json.dumps(self.result()), encoding="utf-8")
                temporary.replace(self._path)
                written_s = time.monotonic()

    def _count(self, frame: FrameType | None, phase: str) -> None:
        frames = []
        while frame is not None and frame.f_code is not self._above:
            frames.append(frame)
            frame = frame.f_back
        own = [item for item in frames if not is_library(item.f_code)]
        if not own:
            return
        is_tokenizer = any(
            word in f"{Path(item.f_code.co_filename).name} {item.f_code.co_name}".lower()
            for item in frames
            for word in TOKENIZER_WORDS
        )
        code = own[0].f_code
        self._counts[phase, f"{code.co_name} ({code.co_filename}:{own[0].f_lineno})", is_tokenizer] += 1

    def result(self) -> list[dict[str, Any]]:
        """The places that were seen most, first."""
        return [
            {"phase": phase, "where": where, "is_tokenizer": is_tokenizer, "count": count}
            for (phase, where, is_tokenizer), count in self._counts.most_common(60)
        ]


def sampled_worker_loop(*args: Any) -> None:
    """What a loader's worker process runs, in place of torch's loop: that loop, with its stack looked at."""
    from torch.utils.data._utils import worker

    spec = read_spec()
    loop = getattr(worker._worker_loop, "__wrapped__", worker._worker_loop)
    if spec is None:
        loop(*args)
        return
    clock = PhaseClock()
    clock.enter(DATA)
    path = Path(spec.folder) / f"worker_{os.environ.get('RANK', '0')}_{os.getpid()}.json"
    with Sampler(clock, above=sampled_worker_loop.__code__, path=path):
        loop(*args)


def read_workers(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What was seen in a rank's workers."""
    return [sample for path in sorted(folder.glob(f"worker_{rank}_*.json")) for sample in json.loads(path.read_text())]
