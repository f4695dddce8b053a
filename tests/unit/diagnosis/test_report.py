"""The report says the same as JSON, as text and as a page that needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import diagnosis_samples as samples
import numpy as np
import pytest

from pretrainkit.diagnosis import compare, html, report


@pytest.fixture(scope="module")
def made() -> dict[str, object]:
    """A report on two ranks with some causes."""
    generator = np.random.default_rng(0)
    saved = {"data": 0.3, "packing": 0.4, "exchange": 0.3}
    ranks = [samples.rank_result(generator, saved, rank=rank, world_size=2) for rank in range(2)]
    return samples.report_of(*ranks)


def test_rates_are_work_over_step_time(made: dict) -> None:  # type: ignore[type-arg]
    speed = made["speed"]
    step_s = speed["step_time_s"]["value"]
    # 2 micro batches a step on each of 2 ranks, of 4 samples and 153 real tokens.
    assert speed["samples_per_second"]["value"] * step_s == pytest.approx(16, rel=1e-3)
    assert speed["effective_tokens_per_second"]["value"] * step_s == pytest.approx(612, rel=1e-3)
    assert speed["padding"]["share"] == pytest.approx(1 - 153 / 256)
    assert speed["padding"]["policies"]["packed"] == 0
    assert sum(made["phases"].values()) == pytest.approx(1)


def test_text_has_every_cause_with_its_change(made: dict) -> None:  # type: ignore[type-arg]
    text = report.text(made)
    assert made["causes"]
    for cause in made["causes"]:
        assert cause["title"] in text
        assert cause["change"] in text
    assert "PAD = EOS" in text
    assert json.loads(json.dumps(made)) == json.loads(json.dumps(made, allow_nan=False))


class _Page(HTMLParser):
    """Notes links and tags, and that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "xlink:href")]
        if tag not in ("meta", "rect", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "path"):
            assert self.open.pop() == tag


def test_the_page_stands_alone_and_shows_all(made: dict) -> None:  # type: ignore[type-arg]
    page = html.page(made)
    parser = _Page()
    parser.feed(page)
    assert parser.links == []
    assert parser.open == []
    assert "script" not in parser.tags
    assert not re.search(r"url\(|@import", page)
    for cause in made["causes"]:
        assert f"{cause['share']['value']:.1%}" in page
        assert cause["known"] in page
    assert parser.tags.count("dt") == 3 * len([*made["causes"], *made["options"]])
    assert "doesn't apply" in page.replace("&#x27;", "'")
    assert "&lt;script&gt;" in page
    assert "&lt;b&gt;/train.py" in page


def test_the_summary_contradicts_nothing_below_it() -> None:
    rank = samples.rank_result(np.random.default_rng(0))
    assert samples.report_of(rank)["summary"].startswith("No cause: every change")
    del rank["pairs"]["packing"]
    found = samples.report_of(rank)
    assert found["summary"] == "No cause was shown for certain. Not ruled out: padding"
    assert "none over" not in report.text(found).lower()
    shown = samples.report_of(samples.rank_result(np.random.default_rng(0), {"packing": 0.76}))
    assert shown["summary"].startswith("padding is computed: measured 76% of the step time")


def test_time_for_data_agrees_with_the_phase(made: dict) -> None:  # type: ignore[type-arg]
    (cause,) = [cause for cause in made["causes"] if cause["phase"] == "data"]
    assert made["phases"]["data"] == pytest.approx(cause["share"]["value"], abs=0.05)


def test_a_run_without_records_has_no_speed_to_compare_with(tmp_path: Path) -> None:
    assert compare.recorded_rate(tmp_path) is None
    (tmp_path / "metrics.jsonl").touch()
    assert compare.recorded_rate(tmp_path) is None


@pytest.mark.parametrize(
    ("more_tokens", "slower", "expected"),
    [
        (10, 1.02, "all of it the amount of data"),
        (1, 2, "as many tokens, and 2 times slower per token: 2 times as long"),
        (10, 1.2, "10 times the tokens, and 1.2 times slower per token: 12 times as long"),
        (1, 0.5, "2 times faster per token"),
    ],
)
def test_more_data_is_told_apart_from_slower_code(more_tokens: float, slower: float, expected: str) -> None:
    assert expected in compare.verdict(more_tokens, slower)
