"""What this rank is doing, for the process that watches the ranks: a record a second with the main thread's stack.

The training notes steps and phases; a thread looks at what the main thread is in. Both go on while the rank waits for
others. A record that stays as it is means that no Python code runs: the process is stopped, or holds the interpreter's
lock. In the latter case a signal handler in C can write its stacks; while Python code runs, that might crash it.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pretrainkit.logs import get_logger
from pretrainkit.run import progress as records
from pretrainkit.run.folder import rank_stack_name
from pretrainkit.units import format_duration

STACK_SIGNAL = signal.SIGRTMIN + 4
"""Makes a rank write its stacks. Schedulers use USR1 and USR2, the C library the first real-time signals."""
_SAMPLE_S, _WRITE_S = 0.2, 1.0
_WINDOW = 300
"""Samples of what the main thread is in: a minute of training."""
_MIN_SAMPLES = 100
_CALLS, _PATH_CHARACTERS = 8, 120
"""Of a stack, and of a path in it: what fits into a record."""
_LOGGED_S = 1.0
"""Phases that took longer are logged."""
_COLLECTIVES = ("distributed_c10d.py", "c10d_logger.py")
_GPU_WAITS = (("loss_guard.py", "judged_grad_norm"),)
"""File and function in which only a wait for the GPU takes time."""
_WAIT_LINE = re.compile(r"\.wait\(|\.item\(|synchronize\(")
_LIBRARIES = re.compile(r"/(torch|megatron|nemo|lightning|pretrainkit)/")

log = get_logger(__name__)


class Progress:
    """Steps and phases of this rank. Without a folder nothing is written: the rank was started by other means."""

    def __init__(self, rank: int = 0) -> None:
        self.stage = 0
        self._rank, self._step, self._phase, self._ticks = rank, 0, records.STARTING, 0
        self._phase_at_s = self._tick_at_s = time.monotonic()
        self._step_at_s: float | None = None
        """End of the last step; None when the time since then is not that of a step."""
        self._step_times_s = deque[float](maxlen=20)
        self._samples = deque[str](maxlen=_WINDOW)
        self._in_data = self._has_trained = False

    def publish(self, folder: Path, log_dir: Path) -> None:
        """From now on keep a record in `folder`, and write this process's stacks to `log_dir` at STACK_SIGNAL."""
        stacks = (log_dir / rank_stack_name(self._rank)).open("a")  # open for as long as the process lives
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
        descriptor = os.open(folder / str(self._rank), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        arguments = (descriptor, threading.get_ident())
        threading.Thread(target=self._watch, args=arguments, name="progress", daemon=True).start()

    def phase(self, words: str) -> None:
        """Begin a phase."""
        took_s = time.monotonic() - self._phase_at_s
        is_logged = self._rank == 0 and not self._has_trained and self._phase != records.STARTING
        if is_logged and took_s > _LOGGED_S:
            log.info("%s took %s", self._phase, format_duration(took_s))
        self._phase = words
        self._step_at_s = None
        self.tick()
        self._phase_at_s = self._tick_at_s

    def tick(self) -> None:
        """Something that takes its time has ended: a phase, a microbatch, a batch of an evaluation."""
        self._ticks += 1
        self._tick_at_s = time.monotonic()

    def step_done(self, step: int) -> None:
        """A step has ended; those of a start but the first count for the usual time of a step."""
        now_s = time.monotonic()
        if self._step_at_s is not None:
            self._step_times_s.append(now_s - self._step_at_s)
        self._step = step
        if self._phase != records.TRAINING:
            self.phase(records.TRAINING)
        self._step_at_s, self._has_trained = now_s, True
        self.tick()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Mark the wait for a batch in the block."""
        self._in_data = True
        try:
            yield
        finally:
            self._in_data = False
            self.tick()

    def _watch(self, descriptor: int, main_thread: int) -> None:
        next_s = 0.0
        while True:
            frame = sys._current_frames().get(main_thread)
            is_waiting = bool(frame and waits_for_ranks(frame))
            if self._phase == records.TRAINING:
                self._samples.append("data" if self._in_data else "wait" if is_waiting else "work")
            now_s = time.monotonic()
            if now_s >= next_s and frame:
                next_s = now_s + _WRITE_S
                os.pwrite(descriptor, self._record(main_thread, is_waiting, innermost_calls(frame)), 0)
            del frame  # or it would keep what the function has in memory
            time.sleep(_SAMPLE_S)

    def _record(self, main_thread: int, is_waiting: bool, stack: list[str]) -> bytes:
        counts, samples, step_times_s = Counter(self._samples), len(self._samples), tuple(self._step_times_s)
        is_measured = samples >= _MIN_SAMPLES
        return records.encode_record(
            {
                "pid": os.getpid(),
                "phase": self._phase,
                "step": self._step,
                "ticks": self._ticks,
                "phase_at_s": self._phase_at_s,
                "tick_at_s": self._tick_at_s,
                "silent_at_s": time.monotonic(),
                "is_waiting": is_waiting,
                "stack": stack,
                "main_thread": f"0x{main_thread:016x}",
                "stage": self.stage,
                "step_time_s": statistics.median(step_times_s) if step_times_s else None,
                "busy": 1 - counts["wait"] / samples if is_measured else None,
                "data": counts["data"] / samples if is_measured else None,
            }
        )


def innermost_calls(frame: FrameType | None) -> list[str]:
    """The last calls of a stack, innermost first."""
    calls: list[str] = []
    while frame and len(calls) < _CALLS:
        path = frame.f_code.co_filename
        calls.append(f"{path[-_PATH_CHARACTERS:]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return calls


def waits_for_ranks(frame: FrameType) -> bool:
    """Whether the innermost frame of a thread waits for other ranks, or for the GPU."""
    path, function = frame.f_code.co_filename, frame.f_code.co_name
    if path.endswith(_COLLECTIVES) or any(path.endswith(file) and function == name for file, name in _GPU_WAITS):
        return True
    line = frame.f_lineno  # None for an instant of some functions' begin
    return bool(line and _LIBRARIES.search(path) and _WAIT_LINE.search(linecache.getline(path, line)))
