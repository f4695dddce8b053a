"""The example scripts on real schedulers: what they submit runs, and a step that is done is not done again."""

from __future__ import annotations

import functools
import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import yaml
from scheduled import REPOSITORY, Site, checkpoints, job_ids, logs, losses, outcome, wait_until

SMALL = ["--accelerator", "cpu", "-g", 4, "--sequence_length", 64, "--split", "8,2,0", "--val_interval", 0]
SMALL += ["--max_steps", 2, "--start_parity", "off"]
"""Flags of pretrain.py for a tiny model and little data."""
TSUBAMES = ("cpu_16", "node_f")
"""Resource types that scripts/sge asks for."""


def run_example(script: str, *words: object, **settings: object) -> subprocess.CompletedProcess[str]:
    """Run an example to its end; `settings` are its variables."""
    return subprocess.run(
        [str(REPOSITORY / "scripts" / "examples" / script), *map(str, words)],
        env={**os.environ, "PYTHON": sys.executable, **{name: str(value) for name, value in settings.items()}},
        capture_output=True,
        text=True,
    )


def shards_and_train(site: Site, model: Path, folder: Path) -> None:
    """An array makes the shards that are missing, and a job trains on them; settings have blanks."""
    text, shards = folder / "my text", folder / "my shards"
    text.mkdir()
    for number in range(3):
        (text / f"part {number}.txt").write_text("one two three four five six seven eight nine ten\n" * 50)
    settings = {"EXECUTOR": site.executor, "SITE": site.file, "MODEL": model, "INPUT": text, "SHARDS": shards}
    settings |= {"EXPERIMENT": "streamed", "SEQUENCE_LENGTH": 64, "NUM_GPUS": 1, "CPUS_PER_TASK": 1}
    words = [*SMALL, "--experiments_dir", folder, "--follow"]
    made = run_example("shards_and_train.sh", *words, **settings)
    assert made.returncode == 0, made.stdout + made.stderr + logs(folder / "streamed")
    assert "3 of 3 shards are complete" in made.stdout and sorted(losses(folder / "streamed")) == [1, 2]

    others = {path: path.stat().st_mtime_ns for path in shards.glob("shard-0000[01].*")}
    (shards / "shard-00002.json").unlink()
    again = run_example("shards_and_train.sh", *words, "--dry_run", **settings)
    assert again.returncode == 0 and "3 of 3 shards are complete" in again.stdout, again
    assert {path: path.stat().st_mtime_ns for path in shards.glob("shard-0000[01].*")} == others


def jsonl_to_pretrain(site: Site, model: Path, jsonl_file: Path, folder: Path) -> None:
    """A job writes the pair, and the training's script is for it."""
    settings = {"EXECUTOR": site.executor, "SITE": site.file, "MODEL": model, "INPUT": jsonl_file, "WORKERS": 1}
    settings |= {"PREPARED": folder / "pre processed", "WEIGHTS": model}
    words = [*SMALL, "--experiments_dir", folder, "-G", 2, "-T", 2, "--dry_run"]
    done = run_example("jsonl_to_pretrain.sh", *words, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "pre processed" / "reference_text_document.manifest.json").is_file()
    assert "#SBATCH " in done.stdout and "TP 2" in done.stdout


def continual_pretraining(site: Site, model: Path, documents: list[str], folder: Path) -> None:
    """Note 4's four steps, by a qsub that takes a group as TSUBAME's does."""
    _offer_tsubames_resources(folder)
    qsub = _qsub_with_groups(folder / "bin")
    group_site = folder / "site.yaml"
    described = yaml.safe_load(site.file.read_text(encoding="utf-8"))
    group_site.write_text(yaml.safe_dump({**described, "account_option": "-g"}))
    for name in ("ja/part 1", "ja/part 2", "en/part 1"):
        path = folder / "corpus" / f"{name}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in documents).encode()))
    settings = {
        "PATH": f"{qsub.parent}:{os.environ['PATH']}",
        "ACCOUNT": "tga-test",
        "SITE": group_site,
        "INPUT": folder / "corpus",
        "PREPARED": folder / "pre pared",
        "MODEL": model,
        "CHECKPOINT": folder / "check point",
        "EXPERIMENTS_DIR": folder,
        "RELEASED": folder / "to release" / "model",
        "WORKERS": 1,
        "WANDB_MODE": "offline",
    }
    step = functools.partial(run_example, "continual_pretraining.sh", **settings)

    prepared = step("data")
    assert prepared.returncode == 0, prepared.stdout + prepared.stderr
    pairs = sorted(str(path.relative_to(folder / "pre pared")) for path in folder.glob("pre pared/*/*.idx"))
    assert pairs == [f"{name}_text_document.idx" for name in ("en/part 1", "ja/part 1", "ja/part 2")]
    for_megatron = step("convert", FORMAT="torch", CHECKPOINT=folder / "torch")
    assert for_megatron.returncode == 0, for_megatron.stdout + for_megatron.stderr
    ranks = sorted(path.name for path in folder.glob("torch/release/mp_rank_*"))
    assert ranks == ["mp_rank_00_000", "mp_rank_00_001"]
    converted = step("convert")
    assert converted.returncode == 0, converted.stdout + converted.stderr
    submissions = qsub.with_name("submitted").read_text()
    assert [step(name).returncode for name in ("data", "convert")] == [0, 0]
    assert qsub.with_name("submitted").read_text() == submissions

    trained = step("train", *SMALL, "-G", 2)
    assert trained.returncode == 0 and job_ids(trained.stdout), trained.stderr
    wait_until(lambda: outcome(folder / "llm-cpt"), "end of the training")
    assert outcome(folder / "llm-cpt")["exit_code"] == 0, logs(folder / "llm-cpt")
    assert checkpoints(folder / "llm-cpt") == ["step_00000002"] and (folder / "llm-cpt" / "wandb").is_dir()

    released = step("release")
    assert released.returncode == 0 and "step_00000002" in released.stdout, released.stderr
    report, log = folder / "to release" / "model.verified.json", folder / "to release" / "model.log"
    wait_until(report.is_file, "report of the release")
    assert json.loads(report.read_text())["passed"] is True, log.read_text()
    assert len(qsub.with_name("submitted").read_text().splitlines()) == 5
    assert all(line.startswith("-g tga-test ") for line in qsub.with_name("submitted").read_text().splitlines())


def _offer_tsubames_resources(folder: Path) -> None:
    """Let this Grid Engine know the resource types that scripts/sge asks for."""
    known = Site.command("qconf", "-sc").splitlines()
    lines = [f"{name} {name} INT <= YES NO 0 0" for name in TSUBAMES if not any(name in line for line in known)]
    file = folder / "complexes"
    file.write_text("\n".join([*known, *lines]) + "\n")
    Site.command("qconf", "-Mc", str(file))
    for name in TSUBAMES:
        Site.command("qconf", "-mattr", "exechost", "complex_values", f"{name}=1", socket.gethostname())


def _qsub_with_groups(folder: Path) -> Path:
    """A qsub that takes -g GROUP first, writes down what it was given, and submits without it."""
    folder.mkdir()
    path = folder / "qsub"
    path.write_text(
        f'#!/bin/sh\necho "$*" >> "{folder}/submitted"\n[ "$1" = -g ] || exit 1\nshift 2\n'
        f'PATH="${{PATH#*:}}" exec qsub "$@"\n'
    )
    path.chmod(0o755)
    return path
