"""Pages drawn by Chromium without a network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = Path(__file__).parents[2] / "build"
"""Kept for people to look at; build/ is not under version control."""
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")


def draw(page: Path, name: str, *, width: int, height: int) -> tuple[Any, str]:
    """The pixels [height, width, 3 or 4] of a page, and its text as the browser has it; the picture stays as `name`."""
    import matplotlib.image

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]
    options += ["--disable-dev-shm-usage", "--proxy-server=127.0.0.1:9", f"--user-data-dir={page.parent / 'browser'}"]
    picture = PICTURES / name
    PICTURES.mkdir(exist_ok=True)
    assert BROWSER
    wanted = [[f"--screenshot={picture}"], ["--dump-dom"]]
    done = [
        subprocess.run([BROWSER, *options, *each, page.as_uri()], capture_output=True, text=True, timeout=120)
        for each in wanted
    ]
    assert not any(each.returncode for each in done), done[0].stderr
    return matplotlib.image.imread(picture), done[1].stdout
