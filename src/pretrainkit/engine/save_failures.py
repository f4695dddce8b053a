"""Why a checkpoint couldn't be written, and whether to try again. Pure."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass

from pretrainkit.units import format_bytes

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""No space on the device, quota used up, file larger than allowed: trying again at once finds the same."""
_LASTING = FULL | {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG}
NEXT_TO_NOTHING = 1 << 26
"""Bytes that count as none free (assumed: less than any file of a checkpoint that could matter)."""
_FIRST_WAIT_S = 1.0
_WAIT_GROWTH = 4.0
_ERRNO_IN_TEXT = re.compile(r"\[Errno (\d+)\]")


@dataclass(frozen=True)
class SaveFailure:
    """One failed attempt to write a checkpoint; every rank holds the same."""

    message: str
    errno: int | None = None
    """Of the system call that failed; None where something else did."""

    @property
    def is_full(self) -> bool:
        """Whether there was no room."""
        return self.errno in FULL

    @property
    def is_lasting(self) -> bool:
        """Whether a second try would fail for the same reason. I/O errors, stale NFS handles and the like pass."""
        return self.errno in _LASTING

    def advice(self, free_bytes: int | None, checkpoint_bytes: int | None) -> str:
        """What to do about it; bytes that are free where checkpoints lie, and that one of them takes, if known."""
        if not self.is_full:
            return "look at the file system and the log; the same command continues the run"
        free = "" if free_bytes is None else f"{format_bytes(free_bytes)} are free"
        size = "" if checkpoint_bytes is None else f"a checkpoint takes {format_bytes(checkpoint_bytes)}"
        facts = ", ".join(fact for fact in (free, size) if fact)
        return (
            f"make room or ask for more quota{f' ({facts})' if facts else ''}; --keep_last and --keep_optimizer_last "
            "keep fewer and smaller checkpoints, and one more than they keep must fit"
        )


def failure_of(error: BaseException, *, free_bytes: int | None = None) -> SaveFailure:
    """The failure that an error means: its causes are searched for a system error, then its text.

    torch's writer of archives names no system error; where next to no bytes are free, that is why it failed.
    """
    number: int | None = None
    seen: BaseException | None = error
    while number is None and seen is not None:
        number = seen.errno if isinstance(seen, OSError) else None
        seen = seen.__cause__ or seen.__context__
    text = str(error)
    if number is None and (match := _ERRNO_IN_TEXT.search(text)):
        number = int(match.group(1))
    if number is None and free_bytes is not None and free_bytes < NEXT_TO_NOTHING:
        number = errno.ENOSPC
    name = "" if number is None else f"{errno.errorcode.get(number, number)} ({os.strerror(number)}): "
    lines = text.strip().splitlines() or [""]
    return SaveFailure(f"{name}{type(error).__name__}: {lines[-1].strip()}", number)


def wait_s(attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt` (the first is 1)."""
    return float(_FIRST_WAIT_S * _WAIT_GROWTH ** (attempt - 1))
