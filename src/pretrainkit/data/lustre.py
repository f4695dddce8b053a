"""Lustre: files of a folder spread over several storage targets."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from pretrainkit.logs import get_logger

LOGGER = get_logger(__name__)


def set_stripe(folder: Path, stripe_count: int) -> None:
    """Spread files that will be made in a folder over several Lustre targets, where that is possible."""
    lfs = shutil.which("lfs")
    if lfs is None:
        LOGGER.warning("--stripe has no effect: this machine has no lfs command")
        return
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([lfs, "setstripe", "-c", str(stripe_count), str(folder)], capture_output=True, text=True)
    if done.returncode:
        LOGGER.warning("--stripe has no effect: lfs setstripe says: %s", done.stderr.strip())
