"""The example scripts do what they say on this machine, at small size; those of schedulers are in services/."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_server import TOKEN, HubServer

from pretrainkit.run.json_lines import read_records

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "scripts" / "examples"
Example = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose outputs lie in a folder of its own, with its environment."""
    folder = tmp_path / "my checkout"
    folder.mkdir()
    for name in ("configs", "pretraining", "scripts", "tools"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


@pytest.fixture
def run(checkout: Path) -> Example:
    """Run an example to its end; the variables are its settings."""

    def run(script: str, *words: object, **variables: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(checkout / "scripts" / "examples" / script), *map(str, words)],
            cwd="/",  # a script finds the checkout from anywhere
            env={**os.environ, **{name: str(value) for name, value in variables.items()}},
            capture_output=True,
            text=True,
        )

    return run


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


def test_a_dataset_is_prepared_once_trained_on_and_continued(
    run: Example, checkout: Path, model: Path, jsonl_file: Path
) -> None:
    settings = {"MODEL": model, "INPUT": jsonl_file, "SMALL": 1}
    packed, experiment = checkout / "data/packed/my_pretraining", checkout / "experiments/my_pretraining"
    too_early = run("pretrain_cont.sh", **settings)
    assert too_early.returncode == 2 and "scripts/examples/pretrain.sh begins it" in too_early.stderr
    assert not packed.exists()
    begun = run("pretrain.sh", **settings, DATASET_NUM_PROC=1)
    assert begun.returncode == 0, begun.stderr
    assert "DATASET_NUM_PROC=1 (environment)" in begun.stderr and steps(experiment) == [1, 2, 3, 4]
    prepared = files_in(packed)
    again = run("pretrain.sh", **settings)
    assert again.returncode == 2 and "scripts/examples/pretrain_cont.sh continues it" in again.stderr
    continued = run("pretrain_cont.sh", "--max_steps", 6, **settings)
    assert continued.returncode == 0, continued.stderr
    assert steps(experiment) == [1, 2, 3, 4, 5, 6] and files_in(packed) == prepared


def test_a_jsonl_file_is_trained_on_and_the_run_diagnosed(
    run: Example, checkout: Path, model: Path, jsonl_file: Path
) -> None:
    news = checkout / "wiki news.jsonl"
    news.write_bytes(jsonl_file.read_bytes())
    settings = {"MODEL": model, "INPUT": news, "SMALL": 1}
    trained = run("jsonl_to_pretrain.sh", **settings)
    assert trained.returncode == 0, trained.stderr
    assert steps(checkout / "experiments/llama31_pretraining") == [1, 2, 3, 4]
    folder = checkout / "data/custom_dataset/preprocessed"
    prepared = files_in(folder)
    assert {path.name for path in prepared} >= {"wiki news_text_document.bin", "wiki news_text_document.idx"}

    again = run("jsonl_to_pretrain.sh", "--max_steps", 6, "--dry_run", **settings)
    assert again.returncode == 0 and "wiki news_text_document is there" in again.stderr, again.stderr
    assert files_in(folder) == prepared and "continuing" in again.stdout

    random = run("jsonl_to_pretrain.sh", WEIGHTS="", **settings)
    assert random.returncode == 2 and "--nemo_model: " in random.stderr and "leaves it to you" in random.stderr

    diagnosed = run("diagnose.sh", "--probes", "threads", "--budget_s", 3, SMALL=1)
    assert diagnosed.returncode == 0, diagnosed.stderr
    assert "4 of 4" in diagnosed.stdout and "report.html" in diagnosed.stdout
    (found,) = (checkout / "diagnosis").glob("llama31_pretraining/*/report.json")
    assert json.loads(found.read_text())["speed"]["tokens_per_step"] == 4 * 128


def test_shards_that_are_missing_are_made_before_the_training(run: Example, checkout: Path, model: Path) -> None:
    text = checkout / "my text"
    text.mkdir()
    for number in range(3):
        (text / f"part{number}.txt").write_text("one two three four five six seven eight nine ten\n" * 50)
    settings = {"MODEL": model, "INPUT": text, "SMALL": 1}
    trained = run("shards_and_train.sh", **settings)
    assert trained.returncode == 0, trained.stderr
    assert "3 of 3 shards are complete" in trained.stdout
    assert steps(checkout / "experiments/llama31_shards") == [1, 2, 3, 4]
    shards = checkout / "data/shards"
    before = files_in(shards)
    (shards / "shard-00001.json").unlink()
    again = run("shards_and_train.sh", "--dry_run", **settings)
    assert again.returncode == 0 and "150 documents" in again.stdout, again.stderr
    changed = {path.name for path, written in files_in(shards).items() if before.get(path) != written}
    assert changed == {"shard-00001.json", "shard-00001.tar", "shard-00001.samples"}

    (text / "part1.txt").write_text("another text\n" * 50)
    stale = run("shards_and_train.sh", "--dry_run", **settings)
    assert stale.returncode == 1 and "input that has changed since: 1" in stale.stdout


def test_folders_of_text_become_a_verified_release(run: Example, checkout: Path, model: Path, jsonl_file: Path) -> None:
    lines = jsonl_file.read_bytes().splitlines(keepends=True)
    for number, name in enumerate(("ja/a", "ja/b", "en/a")):
        file = checkout / "corpus" / f"{name}.jsonl.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(b"".join(lines[10 * number : 10 * number + 10])))
    settings = {"MODEL": model, "INPUT": checkout / "corpus", "SMALL": 1}
    for step in ("data", "convert", "train", "release"):
        done = run("continual_pretraining.sh", step, **settings)
        assert done.returncode == 0, f"{step}: {done.stderr}"
    pairs = {path.relative_to(checkout / "data/prepared") for path in (checkout / "data/prepared").rglob("*.bin")}
    assert pairs == {Path(f"{name}_text_document.bin") for name in ("ja/a", "ja/b", "en/a")}
    assert steps(checkout / "experiments/llm-cpt") == [1, 2, 3, 4]
    assert "passed" in (checkout / "released/llm-cpt/step_00000004.verified.md").read_text(encoding="utf-8")
    assert (checkout / "released/llm-cpt/step_00000004/model.safetensors").is_file()


def test_a_stable_run_is_decayed_averaged_and_published(
    run: Example, checkout: Path, model: Path, dataset_prefix: Path
) -> None:
    """Three branches from different steps, a page that compares them, their average with the gate, and a hub."""
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n# The base model\n")
    hub = HubServer()
    settings = {"MODEL": model, "DATA": dataset_prefix, "SMALL": 1, "REPO": "lab/tiny"}
    settings |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": 1, "HF_HOME": checkout / "hf"}
    try:
        for step in ("stable", "decay", "compare", "release"):
            done = run("decay_branches.sh", step, **settings)
            assert done.returncode == 0, f"{step}: {done.stdout}{done.stderr}"
        published = run("decay_branches.sh", "publish", "--base-model", "owner/base", **settings)
        assert published.returncode == 0, published.stderr
        again = run("decay_branches.sh", "publish", "--base-model", "owner/base", **settings)
        assert "has this release already" in again.stdout
    finally:
        hub.close()
    experiments = checkout / "experiments"
    assert steps(experiments / "stable") == [1, 2, 3, 4, 5, 6]
    for number, first in ((1, 6), (2, 4), (3, 2)):
        records = read_records(experiments / f"stable_decay_{number}" / "metrics.jsonl")
        rates = [record["learning_rate"] for record in records if "loss" in record]
        assert steps(experiments / f"stable_decay_{number}") == [first + 1, first + 2] and rates[1] < rates[0]
    assert "stable_decay_3" in (experiments / "stable.html").read_text(encoding="utf-8")
    card = hub.repositories["lab/tiny"].branches["main"][-1][1]["README.md"].decode()
    for words in (
        "The average of stable_decay_1 at step 8, stable_decay_2 at step 6, stable_decay_3 at step 4.",
        "| branch | of stable at step 6 |",
        "--branch_from stable:2",
        "--lr_schedule constant",
        "The release check passed",
    ):
        assert words in card, card
    losses = [line for line in card.splitlines() if line.startswith("| training loss |")]
    assert len(losses) == 3 and all("(step 1)" in line for line in losses), (
        "a branch's training begins with its parent's"
    )


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
    "no-branches-step": ("decay_branches.sh", (), {}, "usage: decay_branches.sh stable|decay|compare|release|publish"),
    "decay-before-training": ("decay_branches.sh", ("decay",), {}, "fewer than three checkpoints"),
    "release-before-decay": ("decay_branches.sh", ("release",), {}, "no complete checkpoint in"),
    "publish-nowhere": ("decay_branches.sh", ("publish",), {}, "set REPO to OWNER/NAME"),
    "diagnose-nothing": ("diagnose.sh", (), {"EXPERIMENT": "/nowhere"}, "/nowhere"),
}


@pytest.mark.parametrize(("script", "words", "settings", "expected"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_setting_is_told_before_any_work(
    script: str,
    words: tuple[str, ...],
    settings: dict[str, str],
    expected: str,
    model: Path,
    run: Example,
    tmp_path: Path,
) -> None:
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    places = {"PREPARED": tmp_path / "out", "PACKED": tmp_path / "out", "SHARDS": tmp_path / "out"}
    places |= {"EXPERIMENTS_DIR": tmp_path / "out", "INPUT": tmp_path / "text.jsonl", "MODEL": model}
    settings = {name: str(tmp_path / "empty") if value == "EMPTY" else value for name, value in settings.items()}
    done = run(script, *words, **{**places, **settings})
    assert done.returncode == 2 and expected in done.stderr, done
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "empty", tmp_path / "text.jsonl"])


def test_the_readme_tells_of_every_script_and_setting() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for script in EXAMPLES.glob("*.sh"):
        settings = set(re.findall(r"\$\{([A-Z_]+):?[-+]", script.read_text(encoding="utf-8"))) - {"PRETRAIN_CONTINUES"}
        assert f"`{script.name}`" in readme
        assert [name for name in settings if f"`{name}`" not in readme] == [], script.name
