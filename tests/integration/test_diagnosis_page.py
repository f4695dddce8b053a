"""The report's page is drawn by a browser without a network."""

from __future__ import annotations

from pathlib import Path

import diagnosis_samples as samples
import numpy as np
import pytest
from browser import draw, needs_browser

from pretrainkit.diagnosis import html

pytestmark = pytest.mark.integration


@needs_browser
@pytest.mark.parametrize("width", [1000, 390], ids=["screen", "phone"])
def test_the_page_is_drawn(width: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    saved = {"data": 0.3, "packing": 0.4, "exchange": 0.3}
    ranks = [samples.rank_result(generator, saved, rank=rank, world_size=2) for rank in range(2)]
    made = samples.report_of(*ranks)
    page = tmp_path / "report.html"
    page.write_text(html.page(made), encoding="utf-8")
    pixels, text = draw(page, f"diagnosis-{width}.png", width=width, height=2600)
    assert pixels.shape[:2] == (2600, width)
    # Nothing is cut off: a margin at the right is empty.
    assert (pixels[:, -8:, :3] == pixels[0, 0, :3]).all()
    # The colours of a cause's bar and of phases are on it.
    for colour in ((0xC2, 0x41, 0x0C), (0x25, 0x63, 0xEB), (0x7C, 0x3A, 0xED)):
        distance = np.abs(pixels[..., :3] - np.array(colour) / 255).max(axis=-1)
        assert (distance < 0.02).sum() > 500
    for cause in made["causes"]:
        assert cause["title"] in text
