"""What is known of the training loop in this process: its loader, modules, optimizers, and its own functions.

Filled by the hooks while the loop runs; read by the probes.
"""

from __future__ import annotations

import dis
import gc
import site
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

_LIBRARIES = tuple(
    {
        str(Path(path).resolve())
        for path in (*sysconfig.get_paths().values(), *site.getsitepackages(), str(Path(__file__).parents[2]))
        if path
    }
    - {sysconfig.get_paths()["data"], sysconfig.get_paths()["scripts"]}
)
_STUB = compile("def stub(*args, **kwargs): return None", "<pretrainkit>", "exec").co_consts[0]


def is_library(code: CodeType) -> bool:
    """Whether code belongs to Python, an installed package or this project, not to the user's program."""
    return code.co_filename.startswith(_LIBRARIES) or code.co_filename.startswith("<")


def own_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of the user's program on a stack, outermost first."""
    frames = []
    while frame is not None:
        if not is_library(frame.f_code):
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def place(code: CodeType) -> str:
    """'function (file:line)' of code."""
    name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"


class Loop:
    """The loop as the hooks have seen it."""

    def __init__(self) -> None:
        self.loader: Any = None
        """The DataLoader whose batches are trained on."""
        self.optimizers: list[Any] = []
        self.attention: dict[str, Any] = {}
        """The first call of scaled_dot_product_attention: shapes, dtype, mask."""
        self.reads: defaultdict[str, int] = defaultdict(int)
        """'what at file:line' -> how often the loop has read a tensor's value or printed there."""
        self.loggers: dict[CodeType, str] = {}
        """Functions called by the loop, whose result it doesn't use, that print or read values: name by code."""
        self._stacks: dict[str, list[CodeType]] = {}
        self._working: set[CodeType] = set()

    def saw(self, event: str) -> None:
        """Note the user's functions that are on the stack where data is fetched, or the optimizer steps."""
        if event not in self._stacks:
            codes = [frame.f_code for frame in own_frames(sys._getframe(2))]
            self._stacks[event] = codes
            self._working |= set(codes)

    def stack(self, event: str) -> list[CodeType]:
        """The user's functions that were on the stack at an event, outermost first."""
        return self._stacks.get(event, [])

    def saw_read(self, what: str) -> str:
        """Note that the loop's own code read a value or printed; gives where, '' if it was inside a library."""
        frames = own_frames(sys._getframe(2))
        if not frames:
            return ""
        caller = frames[-1]
        where = f"{what} at {caller.f_code.co_filename}:{caller.f_lineno}"
        self.reads[where] += 1
        loop_frame = self._frame_of_loop(frames)
        if loop_frame is not None and loop_frame + 1 < len(frames):
            called = frames[loop_frame + 1].f_code
            if called not in self._working and called not in self.loggers and _ignores_result(frames[loop_frame]):
                self.loggers[called] = place(called)
        return where

    def _frame_of_loop(self, frames: list[FrameType]) -> int | None:
        """Index of the frame that both fetches batches and steps the optimizer, by itself or through others."""
        if "data" not in self._stacks or "optimizer" not in self._stacks:
            return None
        common = [a for a, b in zip(self._stacks["data"], self._stacks["optimizer"], strict=False) if a is b]
        codes = [frame.f_code for frame in frames]
        return len(common) - 1 if common and codes[: len(common)] == common else None


def _ignores_result(frame: FrameType) -> bool:
    """Whether the call that a frame is in drops what it returns."""
    instructions = list(dis.get_instructions(frame.f_code))
    following = [item.opname for item in instructions if item.offset > frame.f_lasti and item.opname != "CACHE"]
    return bool(following) and following[0] == "POP_TOP"


class Silenced:
    """Makes functions do nothing for a while, wherever they are referred to."""

    def __init__(self, codes: Iterator[CodeType] | list[CodeType]) -> None:
        self._functions = [
            (function, function.__code__)
            for code in codes
            for function in gc.get_referrers(code)
            if type(function) is FunctionType and function.__code__ is code and not code.co_freevars
        ]

    def turn(self, is_on: bool) -> None:
        """Replace their bodies, or give them back."""
        for function, code in self._functions:
            function.__code__ = _STUB if is_on else code
