"""evaluate.py: a checkpoint in Megatron-core and its release in transformers have the same scores on tasks."""

from __future__ import annotations

import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_models
import pytest
from hub_server import HubServer

pytestmark = pytest.mark.integration
pytest.importorskip("lm_eval", reason="the extra `evaluation` is not installed")

REPOSITORY = Path(__file__).parents[2]
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: data/choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: rolling
dataset_path: json
dataset_kwargs: {data_files: {test: data/texts.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
ANSWERS = """
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: data/answers.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["zzz"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def main(name: str) -> Callable[[list[str]], int]:
    return runpy.run_path(str(REPOSITORY / "tools" / f"{name}.py"))["main"]


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@dataclass(frozen=True)
class Trained:
    checkpoint: Path
    released: Path
    tasks: list[str]


@pytest.fixture(scope="module")
def trained(
    make_hf_llama: Callable[..., Path],
    dataset_prefix: Path,
    train_request: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    """A step at TP=2, its release, and three tasks; half of the answers are those of the release."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    home, model = tmp_path_factory.mktemp("evaluate"), make_hf_llama()
    words = ["--experiment", "run", "--experiments_dir", home, "--hf_model_id", model]
    words += ["--dataset_path", dataset_prefix, "--sequence_length", 64, "--global_batch_size", 2, "--max_steps", 1]
    words += ["-T", 2, "--num_gpus", 2, "--accelerator", "cpu", "--val_interval", 0, "--num_workers", 0]
    train_request(list(map(str, words)))
    checkpoint, released = home / "run" / "checkpoints" / "step_00000001", home / "released"
    assert main("convert_checkpoint")([str(checkpoint), str(released)]) == 0

    questions = [
        f"{word} is a statement of the language because" for word in ("if", "while", "try", "with", "del", "x")
    ]
    options = [[f" option {number}", " a block", " names and values"] for number in range(len(questions))]
    choices = [
        {"question": question, "choices": each, "answer": number % 3}
        for number, (question, each) in enumerate(zip(questions, options, strict=True))
    ]
    write_lines(home / "data" / "choices.jsonl", choices)
    write_lines(home / "data" / "texts.jsonl", [{"text": f"{question} it is so. " * 9} for question in questions])
    tokenizer, reader = AutoTokenizer.from_pretrained(released), AutoModelForCausalLM.from_pretrained(released)
    answers = []
    for number, question in enumerate(questions):
        ids = tokenizer(question, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            whole = reader.generate(ids, max_new_tokens=6, do_sample=False)
        given = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
        answers.append({"question": question, "answer": given if number % 2 else "something else"})
    write_lines(home / "data" / "answers.jsonl", answers)
    for name, text in (("choices", CHOICES), ("rolling", ROLLING), ("answers", ANSWERS)):
        (home / f"{name}.yaml").write_text(text)
    return Trained(checkpoint, released, [str(home / f"{name}.yaml") for name in ("choices", "rolling", "answers")])


def test_a_checkpoint_at_its_tensor_parallel_size_has_the_scores_of_its_release(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for target in (trained.checkpoint, trained.released):
        assert main("evaluate")([str(target), "--tasks", *trained.tasks, "--json"]) == 0
        printed = capsys.readouterr()
        found.append(json.loads(printed.out))
        if target == trained.checkpoint:
            assert "in Megatron-core at TP=2, on cpu" in printed.err
    ours, theirs = found
    assert ours["answers"] == theirs["answers"] == {"exact_match": 0.5}
    assert ours["choices"] == theirs["choices"] and ours["choices"].keys() == {"acc", "acc_norm"}
    assert ours["rolling"] == pytest.approx(theirs["rolling"], rel=1e-5)

    experiment = trained.checkpoint.parents[1]
    records = [json.loads(line) for line in (experiment / "metrics.jsonl").read_text().splitlines()]
    (record,) = [each for each in records if each.get("event") == "evaluation"]
    assert record["step"] == 1 and record["tasks"] == ours
    results = json.loads((experiment / "evaluations" / "step_00000001.json").read_text())["results"]
    assert results["choices"]["acc_stderr,none"] > 0


def test_the_gate_compares_scores_on_request(trained: Trained) -> None:
    from pretrainkit.evaluation.tasks import TaskRequest
    from pretrainkit.release.scores import check_scores

    (check,) = check_scores([trained.checkpoint], trained.released, TaskRequest((trained.tasks[0],)))
    assert check.passed and check.found.startswith("choices acc"), check


def test_a_multimodal_model_has_the_scores_of_its_checkpoint(
    trained: Trained, tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_models.save_multimodal_model("ministral3", tmp_path / "hf", vocab_size=320, pad_token_id=2)
    shutil.copytree(tokenizer_folder, tmp_path / "hf", dirs_exist_ok=True)
    assert main("convert_checkpoint")([str(tmp_path / "hf"), str(tmp_path / "nemo")]) == 0
    found = []
    for target in (tmp_path / "nemo", tmp_path / "hf"):
        capsys.readouterr()
        assert main("evaluate")([str(target), "--tasks", *trained.tasks[:2], "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    ours, theirs = found
    assert ours["choices"] == theirs["choices"]
    assert ours["rolling"] == pytest.approx(theirs["rolling"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [("gone.yaml", "no file"), ("without_data.yaml", "can't be loaded: FileNotFoundError: Unable to find")],
    ids=["no file", "no data"],
)
def test_a_wrong_task_is_refused_before_the_model_is_opened(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    (tmp_path / "without_data.yaml").write_text(CHOICES)
    assert main("evaluate")([str(trained.checkpoint), "--tasks", str(tmp_path / name)]) == 2
    printed = capsys.readouterr().err
    assert message in printed and "running" not in printed


ARC_CARD = """---
configs:
- config_name: ARC-Challenge
  data_files: [{split: test, path: ARC-Challenge/test-*}]
- config_name: ARC-Easy
  data_files:
  - {split: train, path: ARC-Easy/train-*}
  - {split: validation, path: ARC-Easy/validation-*}
  - {split: test, path: ARC-Easy/test-*}
---
"""


def questions_of_arc(count: int) -> bytes:
    """A parquet file with the columns of allenai/ai2_arc."""
    import pyarrow
    import pyarrow.parquet

    choices = {"text": [" one", " two", " many", " none"], "label": ["A", "B", "C", "D"]}
    rows = [
        {"id": f"Q{number}", "question": f"How many are {number}?", "choices": choices, "answerKey": "ABCD"[number % 4]}
        for number in range(count)
    ]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def test_a_named_task_is_fetched_from_the_hub_once(trained: Trained, tmp_path: Path) -> None:
    """The whole command in processes of its own, which read the hub's address and cache at their start."""
    hub, environment = HubServer(), {**os.environ, "HF_HOME": str(tmp_path)}
    parts = {"ARC-Challenge/test": 3, "ARC-Easy/train": 7, "ARC-Easy/validation": 4, "ARC-Easy/test": 5}
    files = {f"{part}-00000-of-00001.parquet": questions_of_arc(count) for part, count in parts.items()}
    hub.add("datasets/allenai/ai2_arc", {"README.md": ARC_CARD.encode(), **files}, private=False)

    def evaluate(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, REPOSITORY / "tools" / "evaluate.py", *words]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, env={**environment, **variables})

    fetched = evaluate("--download", "--tasks", "arc_easy", "piqa", HF_ENDPOINT=hub.url)
    hub.close()
    assert fetched.returncode == 2 and "task piqa can't be loaded" in fetched.stderr, fetched.stderr
    assert "Dataset 'baber/piqa' doesn't exist on the Hub" in fetched.stderr
    assert sum("ARC-Easy/" in each and each.startswith("GET") for each in hub.requests) == 3, "each file, once"

    scored = evaluate(trained.released, "--tasks", "arc_easy", "--json", HF_HUB_OFFLINE="1")
    assert scored.returncode == 0, scored.stderr
    assert json.loads(scored.stdout)["arc_easy"].keys() == {"acc", "acc_norm"}
    results = json.loads(scored.stdout)["arc_easy"]["acc"] * 5
    assert results == pytest.approx(round(results)), "five questions of the part for tests"


def test_a_run_evaluates_its_saves(
    trained: Trained,
    make_hf_llama: Callable[..., Path],
    dataset_prefix: Path,
    tmp_path: Path,
) -> None:
    """The whole command, on this machine: what is left at the end of the run is evaluated then."""
    words = [
        sys.executable,
        REPOSITORY / "pretraining" / "pretrain.py",
        "--experiment",
        "run",
        "--experiments_dir",
        tmp_path,
        "--hf_model_id",
        make_hf_llama(),
    ]
    words += ["--dataset_path", dataset_prefix, "--sequence_length", 64, "--global_batch_size", 2, "--max_steps", 3]
    words += ["--num_gpus", 1, "--accelerator", "cpu", "--val_interval", 0, "--num_workers", 0, "--save_interval", 1]
    words += ["--eval_saves", 2, "--eval_limit", 2, "--eval_tasks"]
    (tmp_path / "without_data.yaml").write_text(CHOICES)
    refused, done = (
        subprocess.run(list(map(str, [*words, task])), capture_output=True, text=True)
        for task in (tmp_path / "without_data.yaml", trained.tasks[0])
    )
    assert refused.returncode == 2 and "can't be loaded" in refused.stderr and "logs in" not in refused.stderr
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = {each["step"]: each["tasks"] for each in records if each.get("event") == "evaluation"}
    assert evaluated.keys() == {2, 3}, "every second save interval, and the last step"
    assert all(tasks["choices"].keys() == {"acc", "acc_norm"} for tasks in evaluated.values())
