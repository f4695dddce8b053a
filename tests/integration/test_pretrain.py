"""One command starts a run through NeMo-Run from a Hugging Face folder, and the same command continues it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration
PRETRAIN = Path(__file__).parents[2] / "pretraining" / "pretrain.py"
TOKEN = "hf_very_secret_0123456789"


def command_lines() -> list[str]:
    """Command lines of all processes of this machine."""
    lines = []
    for process in psutil.process_iter():
        try:
            lines.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return lines


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory, make_hf_llama, dataset_prefix: Path) -> list[str]:  # type: ignore[no-untyped-def]
    folder = make_hf_llama()
    text = f"--hf_model_id {folder} --nemo_model {folder} --dataset_path {dataset_prefix.parent} --experiment tiny"
    text += f" --experiments_dir {tmp_path_factory.mktemp('experiments')} --accelerator cpu -G 2 -P 2 -g 4"
    text += " --sequence_length 128 --split 8,2,0 --val_interval 2 --val_steps 1 --lr 1e-3"
    return text.split()


def pretrain(words: list[str], home: Path) -> tuple[int, str, list[str]]:
    """Exit code and output of the command, and every command line seen on the machine while it ran."""
    with (home / "output").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, str(PRETRAIN), *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HOME": str(home)},
        )
        seen: set[str] = set()
        while True:
            try:
                process.wait(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                seen |= set(command_lines())
    return process.returncode, (home / "output").read_text(), sorted(seen)


def steps_of(experiment: Path) -> list[int]:
    records = [json.loads(line) for line in (experiment / "metrics.jsonl").read_text().splitlines()]
    return [record["step"] for record in records if "loss" in record and "learning_rate" in record]


def test_a_run_starts_and_continues_and_nothing_shows_the_token(words: list[str], tmp_path: Path) -> None:
    experiments = Path(words[words.index("--experiments_dir") + 1])
    experiment = experiments / "tiny"

    exit_code, output, seen = pretrain([*words, "--max_steps", "2", "--hf_token", TOKEN], tmp_path)
    assert exit_code == 0, output
    assert "step 2/2" in output and "rank 0" in output
    assert any("pretrainkit.launch.node" in line for line in seen)
    assert not any(TOKEN in line for line in [output, *seen])
    assert len(list((experiments / ".converted").glob("*/weights"))) == 1

    planned = subprocess.run(
        [sys.executable, str(PRETRAIN), *words, "--max_steps", "4", "--plan", "--json"], capture_output=True, text=True
    )
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan.pop("estimates") is None  # there is none on CPU
    assert "warm-up" in plan.pop("schedule")
    assert plan.pop("changes") == {
        "config.training.max_steps": [2, 4],
        "max_steps": [2, 4],
        "lr_decay_steps": [2, 4],
    }
    assert (plan["mode"], plan["step"], plan["consumed_samples"], plan["optimizer_state"]) == (
        *("continue", 2, 8),
        "restored",
    )
    shutil.rmtree(experiments / ".converted")
    exit_code, output, _ = pretrain([*words, "--max_steps", "4"], tmp_path)
    assert exit_code == 0, output
    assert not (experiments / ".converted").exists(), "only the run's own checkpoint is read"
    assert "starting at step 2 of 4" in output and "converting" not in output
    records = [json.loads(line) for line in (experiment / "metrics.jsonl").read_text().splitlines()]
    begin = max(number for number, record in enumerate(records) if record.get("event") == "start")
    kernels = plan.pop("kernels")
    assert records[begin]["kernels"] == {**kernels, "attention": "cpu"}
    assert {name: records[begin][name] for name in plan} == plan
    first = next(record for record in records[begin:] if "learning_rate" in record and "loss" in record)
    assert (first["step"], first["learning_rate"]) == (plan["step"] + 1, plan["learning_rate"])
    assert steps_of(experiment) == [1, 2, 3, 4]
    assert [path.name for path in sorted((experiment / "logs").glob("attempt_*"))] == ["attempt_1", "attempt_2"]
    assert not (tmp_path / ".nemo_run").exists(), "nothing of ours belongs in the user's home"
    files = [path for path in experiments.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]

    exit_code, output, _ = pretrain([*words, "--max_steps", "4", "--seed", "7"], tmp_path)
    assert exit_code == 2 and "config.training.seed was 1234, now 7" in output


def test_a_run_continues_without_the_checkpoint_that_it_began_from(words: list[str], tmp_path: Path) -> None:
    from pretrainkit.checkpoint.convert import convert

    model, first, again = words[words.index("--hf_model_id") + 1], tmp_path / "first", tmp_path / "again"
    convert(model, first)
    asked = [*words, "--experiments_dir", str(tmp_path), "--save_interval", "2"]
    exit_code, output, _ = pretrain([*asked, "--nemo_model", str(first), "--max_steps", "2"], tmp_path)
    assert exit_code == 0, output
    shutil.rmtree(first)

    longer = [*asked, "--max_steps", "3", "--nemo_model"]
    exit_code, output, _ = pretrain([*longer, str(first), "--plan"], tmp_path)
    assert exit_code == 0 and "start      continuing" in output, output
    assert f"no folder {first}: the run started from it" in output
    convert(model, again)
    exit_code, output, _ = pretrain([*longer, str(again), "--plan"], tmp_path)
    assert exit_code == 0 and "start      continuing" in output, output
    exit_code, output, _ = pretrain([*longer, str(first)], tmp_path)
    assert exit_code == 0 and "starting at step 2 of 3" in output, output

    exit_code, output, _ = pretrain([*longer, str(first), "--experiment", "new"], tmp_path)
    assert exit_code == 2 and f"--nemo_model: no folder {first}" in output
