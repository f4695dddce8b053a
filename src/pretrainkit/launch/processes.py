"""Ending what one has started, and what that has started in turn."""

from __future__ import annotations

import contextlib
import ctypes

_PR_SET_CHILD_SUBREAPER = 36
"""prctl option (linux/prctl.h): orphaned descendants become our children, so that we can end them."""
_WAIT_S = 10


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose parent dies, where the system can (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> list[int]:
    """Kill every descendant of this process at once, and wait until they are gone; gives those that were alive."""
    import psutil

    killed = []
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                killed.append(process.pid)
    psutil.wait_procs(descendants, timeout=_WAIT_S)
    return killed
