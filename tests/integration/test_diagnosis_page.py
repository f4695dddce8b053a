"""The report's page is drawn by a browser without a network."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import diagnosis_samples as samples
import numpy as np
import pytest

from pretrainkit.diagnosis import html

pytestmark = pytest.mark.integration
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = Path(__file__).parents[2] / "build"
"""Kept for people to look at; build/ is not under version control."""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [1000, 390], ids=["screen", "phone"])
def test_the_page_is_drawn(width: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    saved = {"data": 0.3, "packing": 0.4, "exchange": 0.3}
    ranks = [samples.rank_result(generator, saved, rank=rank, world_size=2) for rank in range(2)]
    made = samples.report_of(*ranks)
    page = tmp_path / "report.html"
    page.write_text(html.page(made), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},2600"]
    options += ["--disable-dev-shm-usage", "--proxy-server=127.0.0.1:9", f"--user-data-dir={tmp_path / 'browser'}"]
    picture = PICTURES / f"diagnosis-{width}.png"
    PICTURES.mkdir(exist_ok=True)
    assert BROWSER
    drawn = subprocess.run(
        [BROWSER, *options, f"--screenshot={picture}", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert drawn.returncode == 0, drawn.stderr
    import matplotlib.image

    pixels = matplotlib.image.imread(picture)
    assert pixels.shape[:2] == (2600, width)
    # Nothing is cut off: a margin at the right is empty.
    assert (pixels[:, -8:, :3] == pixels[0, 0, :3]).all()
    # The colours of a cause's bar, of the histogram and of phases are on it.
    for colour in ((0xC2, 0x41, 0x0C), (0x25, 0x63, 0xEB), (0x7C, 0x3A, 0xED)):
        distance = np.abs(pixels[..., :3] - np.array(colour) / 255).max(axis=-1)
        assert (distance < 0.02).sum() > 500
    text = subprocess.run(
        [BROWSER, *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    ).stdout
    for cause in made["causes"]:
        assert cause["title"] in text
