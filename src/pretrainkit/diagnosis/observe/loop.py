"""What is known of the training loop in this process: its loader, modules, optimizers, and its own functions.

Filled by the hooks while the loop runs; read by the probes.
"""

from __future__ import annotations

import site
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_LIBRARIES = tuple(
    {
        str(Path(path).resolve())
        for path in (*sysconfig.get_paths().values(), *site.getsitepackages(), str(Path(__file__).parents[2]))
        if path
    }
    - {sysconfig.get_paths()["data"], sysconfig.get_paths()["scripts"]}
)


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


class Loop:
    """The loop as the hooks have seen it."""

    def __init__(self) -> None:
        self.loader: Any = None
        """The DataLoader whose batches are trained on."""
        self.optimizers: list[Any] = []
        self.attention: dict[str, Any] = {}
        """The first call of scaled_dot_product_attention: shapes, dtype, mask."""
        self.reads: defaultdict[str, int] = defaultdict(int)
        """'what at file:line' -> how often the loop's own code has read a tensor's value or printed there."""

    def saw_read(self, what: str) -> None:
        """Note that a value was read or something printed, if the user's code did it."""
        if frames := own_frames(sys._getframe(2)):
            self.reads[f"{what} at {frames[-1].f_code.co_filename}:{frames[-1].f_lineno}"] += 1
