"""The example scripts do what they say on this machine, at small size; those of schedulers are in services/."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.run.json_lines import read_records

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "scripts" / "examples"
SMALL = ["--accelerator", "cpu", "-g", 4, "-T", 1, "--split", "8,2,0", "--val_interval", 0, "--start_parity", "off"]
"""Flags of pretrain.py for a tiny model and little data."""


def run(script: str, *words: object, **variables: object) -> subprocess.CompletedProcess[str]:
    """Run an example to its end; `variables` are its settings."""
    return subprocess.run(
        [str(EXAMPLES / script), *map(str, words)],
        cwd="/",  # a script finds the checkout from anywhere
        env={**os.environ, "PYTHON": sys.executable, **{name: str(value) for name, value in variables.items()}},
        capture_output=True,
        text=True,
    )


def steps(experiment: Path) -> list[int]:
    """Numbers of the steps that were trained, in order."""
    records = read_records(experiment / "metrics.jsonl")
    return [record["step"] for record in records if "loss" in record and "learning_rate" in record]


def files_in(folder: Path) -> dict[Path, int]:
    """When each file was written, ns."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def model(make_hf_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a folder with a blank in its name."""
    folder = tmp_path_factory.mktemp("models") / "my model"
    shutil.copytree(make_hf_llama(), folder)
    return folder


def test_a_dataset_is_prepared_once_trained_on_and_continued(model: Path, jsonl_file: Path, tmp_path: Path) -> None:
    packed, experiments = tmp_path / "my packed", tmp_path / "experiments"
    settings = {"MODEL": model, "INPUT": jsonl_file, "PACKED": packed, "EXPERIMENT": "mine", "NUM_GPUS": 1}
    settings |= {"EXPERIMENTS_DIR": experiments, "SEQUENCE_LENGTH": 64, "DATASET_NUM_PROC": 1}
    words = [*SMALL, "--max_steps"]

    too_early = run("pretrain_cont.sh", *words, 2, **settings)
    assert too_early.returncode == 2 and "scripts/examples/pretrain.sh begins it" in too_early.stderr
    assert not packed.exists()
    begun = run("pretrain.sh", *words, 2, **settings)
    assert begun.returncode == 0, begun.stderr
    assert "DATASET_NUM_PROC=1 (environment)" in begun.stderr
    prepared = files_in(packed)
    again = run("pretrain.sh", *words, 4, **settings)
    assert again.returncode == 2 and "scripts/examples/pretrain_cont.sh continues it" in again.stderr
    continued = run("pretrain_cont.sh", *words, 4, **settings)
    assert continued.returncode == 0, continued.stderr
    assert steps(experiments / "mine") == [1, 2, 3, 4] and files_in(packed) == prepared


def test_a_jsonl_file_is_trained_on_and_the_run_diagnosed(model: Path, jsonl_file: Path, tmp_path: Path) -> None:
    news = tmp_path / "wiki news.jsonl"
    news.write_bytes(jsonl_file.read_bytes())
    settings = {"MODEL": model, "INPUT": news, "PREPARED": tmp_path / "preprocessed", "WORKERS": 1}
    words = [*SMALL, "--sequence_length", 64, "-G", 1, "--max_steps", 4, "--experiments_dir", tmp_path]
    trained = run("jsonl_to_pretrain.sh", *words, **settings)
    assert trained.returncode == 0, trained.stderr
    experiment = tmp_path / "llama31_pretraining"
    assert steps(experiment) == [1, 2, 3, 4]
    prepared = files_in(tmp_path / "preprocessed")
    assert {path.name for path in prepared} >= {"wiki news_text_document.bin", "wiki news_text_document.idx"}

    again = run("jsonl_to_pretrain.sh", *words, "--dry_run", **settings)
    assert again.returncode == 0 and "wiki news_text_document is there" in again.stderr, again.stderr
    assert files_in(tmp_path / "preprocessed") == prepared and "continuing" in again.stdout

    report = tmp_path / "my reports"
    measure = ["--quick", "--probes", "logging", "--budget_s", 3]
    diagnosed = run("diagnose.sh", *measure, EXPERIMENT=experiment, REPORTS=report)
    assert diagnosed.returncode == 0, diagnosed.stderr
    assert "4 of 4" in diagnosed.stdout and "report.html" in diagnosed.stdout
    (found,) = report.glob("llama31_pretraining/*/report.json")
    assert json.loads(found.read_text())["speed"]["tokens_per_step"] == 4 * 64


def test_shards_that_are_missing_are_made_before_the_training(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "my text"
    text.mkdir()
    for number in range(3):
        (text / f"part{number}.txt").write_text("one two three four five six seven eight nine ten\n" * 50)
    shards = tmp_path / "my shards"
    settings = {"MODEL": model, "INPUT": text, "SHARDS": shards, "SEQUENCE_LENGTH": 64, "NUM_GPUS": 1}
    words = [*SMALL, "--max_steps", 2, "--experiments_dir", tmp_path, "--dry_run"]
    made = run("shards_and_train.sh", *words, **settings)
    assert made.returncode == 0, made.stderr
    assert "3 of 3 shards are complete" in made.stdout and "150 documents" in made.stdout
    before = files_in(shards)
    (shards / "shard-00001.json").unlink()
    again = run("shards_and_train.sh", *words, **settings)
    assert again.returncode == 0, again.stderr
    changed = {path.name for path, written in files_in(shards).items() if before.get(path) != written}
    assert changed == {"shard-00001.json", "shard-00001.tar", "shard-00001.samples"}

    (text / "part1.txt").write_text("another text\n" * 50)
    stale = run("shards_and_train.sh", *words, **settings)
    assert stale.returncode == 1 and "input that has changed since: 1" in stale.stdout


WRONG = {
    "shards-without-model": ("shards_and_train.sh", (), {"MODEL": "/nowhere"}, "/nowhere"),
    "shards-of-nothing": ("shards_and_train.sh", (), {"INPUT": "EMPTY"}, "no input file in this folder"),
    "pack-without-model": ("pretrain.sh", (), {"MODEL": "/nowhere"}, "/nowhere"),
    "pack-of-nothing": ("pretrain.sh", (), {"INPUT": "EMPTY"}, "no input file in this folder"),
    "jsonl-without-model": ("jsonl_to_pretrain.sh", (), {"MODEL": "/nowhere"}, "/nowhere"),
    "jsonl-of-nothing": ("jsonl_to_pretrain.sh", (), {"INPUT": "EMPTY"}, "no input file in this folder"),
    "data-of-nothing": (
        "continual_pretraining.sh",
        ("data",),
        {"INPUT": "/nowhere"},
        "no /nowhere, or no file in it: set INPUT",
    ),
    "data-of-an-empty-folder": (
        "continual_pretraining.sh",
        ("data",),
        {"INPUT": "EMPTY"},
        "or no file in it: set INPUT",
    ),
    "convert-nothing": (
        "continual_pretraining.sh",
        ("convert",),
        {"MODEL": "/nowhere"},
        "no /nowhere/config.json",
    ),
    "no-step": ("continual_pretraining.sh", (), {}, "usage: continual_pretraining.sh data|convert|train|release"),
    "release-before-training": ("continual_pretraining.sh", ("release",), {}, "no complete checkpoint"),
    "no-site": ("continual_pretraining.sh", ("data",), {"SITE": "nowhere"}, "no site file nowhere"),
    "diagnose-nothing": ("diagnose.sh", (), {"EXPERIMENT": "/nowhere"}, "/nowhere"),
}


@pytest.mark.parametrize(("script", "words", "settings", "expected"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_setting_is_told_before_any_work(
    script: str, words: tuple[str, ...], settings: dict[str, str], expected: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    places = {"PREPARED": tmp_path / "out", "PACKED": tmp_path / "out", "SHARDS": tmp_path / "out"}
    places |= {"EXPERIMENTS_DIR": tmp_path / "out", "INPUT": tmp_path / "text.jsonl", "MODEL": model}
    settings = {name: str(tmp_path / "empty") if value == "EMPTY" else value for name, value in settings.items()}
    done = run(script, *words, **{**places, **settings})
    assert done.returncode == 2 and expected in done.stderr, done
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "text.jsonl"]


def test_the_readme_tells_of_every_script_and_setting() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for script in EXAMPLES.glob("*.sh"):
        settings = set(re.findall(r"\$\{([A-Z_]+):[-+]", script.read_text(encoding="utf-8"))) - {"PRETRAIN_CONTINUES"}
        assert f"`{script.name}`" in readme
        assert [name for name in settings if f"`{name}`" not in readme] == [], script.name
