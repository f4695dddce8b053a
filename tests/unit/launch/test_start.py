"""A request becomes run.json and a command; everything wrong with it is told before anything is written."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PRETRAIN = REPOSITORY / "pretraining" / "pretrain.py"


def pretrain(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PRETRAIN), *map(str, words)],
        env={**os.environ, "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def request_words(hf_folder: Path, dataset_folder: Path, tmp_path: Path) -> list[str]:
    words = f"--hf_model_id {hf_folder} --dataset_path {dataset_folder} --experiments_dir {tmp_path / 'experiments'}"
    words += " --accelerator cpu -G 2 -P 2 -g 4 --sequence_length 128 --split 8,2,0 --val_interval 5 --dry_run"
    return words.split()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse lists a short flag and its long one in another form")
def test_help_is_as_agreed(golden: Callable[[str, str], None]) -> None:
    golden("pretrain_help.txt", pretrain("--help").stdout)


def test_dry_run_writes_the_run_and_prints_it_with_the_command(
    request_words: list[str], hf_folder: Path, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    done = pretrain(*request_words)
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace(str(tmp_path), "/runs").replace(str(hf_folder), "/models/tiny")
    golden("pretrain_dry_run.txt", text.replace(sys.executable, "python").replace(str(REPOSITORY), "/pretrainkit"))
    experiment = tmp_path / "experiments" / "llama31_pretraining"
    assert json.loads((experiment / "run.json").read_text())["max_steps"] == (80 * 101 - 1) // 128 // 4
    assert not (experiment / "logs").exists() and not (experiment / "checkpoints").exists()


def test_all_problems_of_request_files_and_machine_are_told_at_once(request_words: list[str], tmp_path: Path) -> None:
    done = pretrain(*request_words, "-g", "3", "--split", "1,2", "--nemo_model", tmp_path / "nowhere")
    assert done.returncode == 2
    for expected in ("--split: 2 shares", f"--nemo_model: no folder {tmp_path}/nowhere"):
        assert expected in done.stderr
    assert not (tmp_path / "experiments").exists()


def test_an_unknown_model_family_and_a_folder_without_data_are_told(
    request_words: list[str], hf_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "gpt").mkdir()
    for file in hf_folder.glob("tokenizer*"):
        (tmp_path / "gpt" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "gpt" / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    done = pretrain(*request_words, "--hf_model_id", tmp_path / "gpt", "--dataset_path", tmp_path)
    assert done.returncode == 2
    assert "architecture GPT2LMHeadModel" in done.stderr and "no .bin/.idx pair here" in done.stderr


def test_a_folder_that_cannot_be_written_to_is_told_without_a_traceback(request_words: list[str]) -> None:
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); sys.argv.pop(0)"
    limit += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", limit, str(PRETRAIN), *request_words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert re.search(r"pretrain.py: error: /.*: File too large \(.* free\)\n  What to do: free disk space", done.stderr)


@pytest.mark.parametrize("place", ["a_file", "/proc/nope"], ids=["below a file", "where nothing can be made"])
def test_a_folder_that_cannot_be_is_told_without_a_traceback(
    request_words: list[str], tmp_path: Path, place: str
) -> None:
    (tmp_path / "a_file").touch()
    done = pretrain(*request_words, "--experiments_dir", str(tmp_path / place))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "What to do: free disk space, ask for more quota or permission, or use another" in done.stderr


def test_a_missing_request_is_exit_code_2() -> None:
    done = pretrain()
    assert done.returncode == 2 and "--hf_model_id: missing" in done.stderr and "--dataset_path: missing" in done.stderr


def test_an_unknown_flag_is_exit_code_2() -> None:
    done = pretrain("--global-batch-sizes", "3")
    assert done.returncode == 2 and "--global-batch-sizes" in done.stderr


def test_a_token_on_the_command_line_is_in_no_output_and_no_file(request_words: list[str], tmp_path: Path) -> None:
    token = "hf_very_secret_0123456789"
    for words in (["--hf_token", token], [f"--hf-token={token}"]):
        done = pretrain(*request_words, *words)
        assert done.returncode == 0, done.stderr
        assert token not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(token.encode() in path.read_bytes() for path in files)


def test_yaml_gives_what_the_flags_give(
    request_words: list[str], hf_folder: Path, dataset_folder: Path, tmp_path: Path
) -> None:
    assert pretrain(*request_words).returncode == 0
    run_file = tmp_path / "experiments" / "llama31_pretraining" / "run.json"
    by_flags = run_file.read_text()
    run_file.unlink()
    (tmp_path / "run.yaml").write_text(
        f"hf_model_id: {hf_folder}\nexperiments_dir: {tmp_path / 'experiments'}\n"
        f"data: {{dataset_path: {dataset_folder}, sequence_length: 128, split: '8,2,0'}}\n"
        "parallel: {pipeline_model_parallel_size: 2}\n"
        "training: {global_batch_size: 4, val_interval: 5}\n"
        "launch: {accelerator: cpu, num_gpus: 2}\n"
    )
    done = pretrain("--config", tmp_path / "run.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert run_file.read_text() == by_flags


def test_a_local_run_can_be_in_an_apptainer_container(request_words: list[str], tmp_path: Path) -> None:
    image = tmp_path / "a b.sif"
    image.touch()
    done = pretrain(*request_words, "--container_runtime", "apptainer", "-i", image)
    assert done.returncode == 0, done.stderr
    (command,) = [line for line in done.stdout.splitlines() if line.startswith("command")]
    words = shlex.split(command)[1:]
    assert words[:4] == ["apptainer", "exec", "--cleanenv", "--no-home"]
    place = words.index(str(image))
    assert words[place + 1 : place + 4] == ["python3", "-m", "pretrainkit.launch.node"]
    assert f"{REPOSITORY}:{REPOSITORY}" in words and str(tmp_path / "experiments") in " ".join(words[:place])
    assert pretrain(*request_words, "--container_runtime", "pyxis").returncode == 2


def test_settings_that_need_a_scheduler_are_refused_without_one(request_words: list[str]) -> None:
    done = pretrain(*request_words, "--chain", "2", "--set", "launch.modules=[cuda]")
    assert done.returncode == 2 and "--chain: no effect" in done.stderr and "launch.modules: no effect" in done.stderr
