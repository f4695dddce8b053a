"""Commands on a machine that lacks something: in mount and network namespaces of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

_UNSHARE = ["unshare", "--map-root-user", "--mount", "--net"]


def in_namespace(setup: str, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command after a shell's `setup`, whose mounts and links it alone sees; without a network.

    Skips the test where namespaces can't be made, as in most containers.
    """
    try:
        subprocess.run([*_UNSHARE, "mount", "-t", "tmpfs", "none", "/mnt"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"namespaces can't be made here: {getattr(error, 'stderr', error)!r}")
    words = [*_UNSHARE, "sh", "-ec", f'{setup}\nexec "$@"', "sh", *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, **options)
