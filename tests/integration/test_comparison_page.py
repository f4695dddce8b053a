"""inspect_run.py A B C: one page that a browser draws without a network."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import draw, needs_browser
from tiny_runs import tiny_run

from pretrainkit.config.run_file import write_run
from pretrainkit.run.json_lines import JsonLinesWriter

pytestmark = pytest.mark.integration
inspect_run = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "inspect_run.py"))["main"]
LANGUAGES = ("ja", "en", "日本語")


def write_experiment(folder: Path, *, lr: float, seed: int, num_steps: int = 1200) -> None:
    """An experiment as a run of two starts leaves it, with records that no run made."""
    run = tiny_run(folder, max_steps=num_steps, micro_batch_size=2 if lr > 1e-3 else 1)
    folder.mkdir()
    write_run(folder / "run.json", run)
    out, noise = JsonLinesWriter(folder / "metrics.jsonl"), np.random.default_rng(seed)

    def losses(step: int) -> dict[str, float]:
        return {name: 2 + 8 * math.exp(-lr * step) + number for number, name in enumerate(LANGUAGES)}

    def record(step: int) -> dict[str, Any]:
        value = losses(step)
        return {
            "step": step,
            "loss": None if step == 300 else value["ja"] + 0.3 * noise.standard_normal(),
            "learning_rate": lr * min(1, step / 100),
            "grad_norm": 1 + abs(noise.standard_normal()),
            "tokens": 512 * step,
            "step_time_s": 0.5,
            "tokens_per_second": 1000 + 50 * noise.standard_normal(),
            "loss_by_label": value,
            "router": {"largest_load": 1.5, "smallest_load": 0.5, "balance": 0.9, "aux_loss": 1.1},
        }

    for begin, end in ((0, 700), (600, num_steps)):
        mode = "continue" if begin else "random"
        out.append({"event": "start", "step": begin, "mode": mode, "world_size": 2, "time": "2026-01-01T00:00:00+0000"})
        for step in range(begin, end + 1):
            if step > begin:
                out.append(record(step))
            if step % 200 == 0 and (step or not begin):
                by_label = losses(step)
                held_out = {"val_loss": by_label["en"], "val_bits_per_byte": by_label["en"] / 3}
                out.append({"step": step, **held_out, "val_loss_by_label": by_label})
                tasks = {"arc_easy": {"acc": 0.2 + step / 4000, "acc_stderr": 0.01}, "ppl": {"name": "wiki"}}
                out.append({"event": "evaluation", "step": step, "tasks": tasks})


@pytest.fixture
def experiments(tmp_path: Path) -> list[str]:
    for number, lr in enumerate((1e-3, 2e-3, 4e-3)):
        write_experiment(tmp_path / f"run <{number}>", lr=lr, seed=number)
    return [str(tmp_path / f"run <{number}>") for number in range(3)]


def test_experiments_are_compared_on_one_page(experiments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_run(experiments) == 0
    said = capsys.readouterr().out
    page = Path(experiments[0]).with_name("comparison.html")
    assert said.count("experiment ") == 3 and f"page       {page}" in said
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text and "http" not in text.replace("http://www.w3.org/", ""), "no network is needed"
    for wanted in ("run &lt;2&gt;", "by hours", "label 日本語", "arc_easy: acc", "largest load", "bits per byte"):
        assert wanted in text, wanted
    assert "<td>training.micro_batch_size</td><td>1</td><td>2</td><td>2</td>" in text
    assert "ppl: name" not in text, "a result that is no number"
    assert inspect_run([*experiments[:2], "--json", "--no-plot"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["html"] is None and list(found["experiments"]) == ["run <0>", "run <1>"]
    assert inspect_run([experiments[0], f"{experiments[0]}/"]) == 2
    assert "named twice" in capsys.readouterr().err


@needs_browser
@pytest.mark.parametrize("width", [1200, 390], ids=["screen", "phone"])
def test_the_page_is_drawn(experiments: list[str], tmp_path: Path, width: int) -> None:
    page = tmp_path / "page.html"
    assert inspect_run([*experiments, "--html", str(page)]) == 0
    pixels, text = draw(page, f"comparison-{width}.png", width=width, height=3600)
    assert pixels.shape[:2] == (3600, width)
    assert (pixels[:, -8:, :3] == pixels[0, 0, :3]).all(), "nothing is cut off at the right"
    for colour in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E), (0x2C, 0xA0, 0x2C)):  # a line of each experiment
        distance = np.abs(pixels[..., :3] - np.array(colour) / 255).max(axis=-1)
        assert (distance < 0.05).sum() > 300
    for language in LANGUAGES:
        assert f"label {language}" in text
