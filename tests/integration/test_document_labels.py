"""Labels of documents, from records to the loss by label, through the commands."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrainkit.data.indexed.labels import label_code

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
LANGUAGES = ("en", "ja", "コード")


@pytest.fixture
def tool(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run one of the tools in an empty folder."""

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, ROOT / "tools" / name, *arguments]
        return subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=120)

    return run


def records(count: int) -> list[dict[str, str]]:
    """Some with an empty text, which becomes no document."""
    generator = random.Random(count)
    words = {"en": "the cat sat ", "ja": "データ ", "コード": "def f(x): "}
    languages = generator.choices(LANGUAGES, k=count)
    return [{"text": words[language] * generator.randrange(9), "lang": language} for language in languages]


def wanted_labels(found: list[dict[str, str]]) -> list[str]:
    return [record["lang"] for record in found if record["text"]]


def stored_labels(prefix: Path) -> list[str]:
    names = {label_code(name): name for name in LANGUAGES}
    return [names[code] for code in np.fromfile(f"{prefix}.labels", "<u4").tolist()]


def test_tasks_of_an_array_their_merged_pair_and_tables_have_the_labels_of_the_records(
    tool: Callable[..., Any], tmp_path: Path, tokenizer_folder: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    found = records(900)
    for number in range(3):
        lines = [json.dumps(record) for record in found[300 * number : 300 * (number + 1)]]
        (tmp_path / f"in-{number}.jsonl").write_text("\n".join(lines))
    pq.write_table(pa.Table.from_pylist(found), tmp_path / "in.parquet", row_group_size=100)
    common = ["--tokenizer-model", tokenizer_folder, "--append-eod", "--label-key", "lang"]
    for task in range(2):
        inputs = ["--input", *(f"in-{number}.jsonl" for number in range(3))]
        done = tool("preprocess_data.py", *common, *inputs, "--output-prefix", "parts/a", "--shard", f"{task}/2")
        assert done.returncode == 0, done.stderr
    done = tool("preprocess_data.py", *common, "--input", "in.parquet", "--output-prefix", "table", "--workers", 2)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "parts").iterdir())  # as a shell's glob gives them
    done = tool("inspect_data.py", "merge", "--input", *files, "--output-prefix", "merged")
    assert done.returncode == 0, done.stderr
    assert stored_labels(tmp_path / "merged") == stored_labels(tmp_path / "table_text_document") == wanted_labels(found)
    manifests = [
        json.loads((tmp_path / f"{name}.manifest.json").read_text()) for name in ("merged", "table_text_document")
    ]
    assert manifests[0]["labels"] == manifests[1]["labels"]
    counts = manifests[0]["labels"]["counts"]
    assert {label: documents for label, (documents, _) in counts.items()} == {
        label: wanted_labels(found).count(label) for label in LANGUAGES
    }
    assert sum(tokens for _, tokens in counts.values()) == manifests[0]["num_tokens"]
    assert tool("inspect_data.py", "verify", "parts", "merged", "table_text_document").returncode == 0
    shown = tool("inspect_data.py", "show", "merged", "--documents", "0:4", "--json").stdout.splitlines()
    assert [json.loads(line)["label"] for line in shown] == wanted_labels(found)[:4]


def test_wrong_labels_are_seen_and_what_has_none_is_refused(
    tool: Callable[..., Any], tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records(60))))
    (tmp_path / "in.txt").write_text("some text\n")
    tokens = ["--tokenizer-model", tokenizer_folder]
    done = tool("preprocess_data.py", *tokens, "--input", "in.txt", "--output-prefix", "x", "--label-key", "lang")
    assert (done.returncode, "in.txt is text, which has no 'lang'" in done.stderr) == (2, True)
    done = tool("preprocess_data.py", *tokens, "--input", "in.jsonl", "--output-prefix", "x", "--label-key", "source")
    assert (done.returncode, "in.jsonl:1: no label: there is no 'source'" in done.stderr) == (1, True)
    done = tool("preprocess_data.py", *tokens, "--input", "in.jsonl", "--output-prefix", "y", "--label-key", "lang")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "y_text_document.labels"
    codes = np.fromfile(path, "<u4")
    codes[[0, -1]] = (
        codes[[-1, 0]] if codes[0] != codes[-1] else label_code("en" if codes[0] != label_code("en") else "ja")
    )
    path.write_bytes(codes.tobytes())
    done = tool("inspect_data.py", "verify", "y_text_document")
    assert (done.returncode, "is not what the manifest says" in done.stdout) == (1, True)
    path.write_bytes(codes[1:].tobytes())
    again = [*tokens, "--input", "in.jsonl", "--output-prefix", "y", "--overwrite"]
    done = tool("inspect_data.py", "verify", "y_text_document")
    assert (done.returncode, f"{4 * len(codes) - 4} bytes" in done.stdout) == (1, True)
    assert tool("preprocess_data.py", *again).returncode == 0
    assert not path.exists()


@pytest.mark.parametrize("layout", ["PP=2", "TP=2", "CP=2"])
def test_the_loss_by_label_adds_up_to_the_loss(
    tool: Callable[..., Any],
    tmp_path: Path,
    tokenizer_folder: Path,
    make_hf_llama: Callable[..., Path],
    train_request: Callable[..., list[dict[str, Any]]],
    layout: str,
) -> None:
    """The label of a loss is that of the document of the token that is predicted."""
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records(900))))
    more = ["--label-key", "lang"] if layout != "TP=2" else []
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, records(400))))
    command = ["--tokenizer-model", tokenizer_folder, "--append-eod", "--output-prefix", "d/a", *more]
    assert tool("preprocess_data.py", *command, "--input", "in.jsonl", "more.jsonl").returncode == 0
    flag = {
        "PP": "--pipeline_model_parallel_size",
        "TP": "--tensor_model_parallel_size",
        "CP": "--context_parallel_size",
    }
    words = ["--executor", "local", "--accelerator", "cpu", "--num_gpus", 2, flag[layout[:2]], 2]
    words += ["--hf_model_id", make_hf_llama(seed=3), "--dataset_path", tmp_path / "d", "--sequence_length", 64]
    words += ["--experiments_dir", tmp_path, "--experiment", "e", "--global_batch_size", 4, "--micro_batch_size", 2]
    words += ["--max_steps", 2, "--split", "100,0,0", "--val_interval", 0, "--num_workers", 0, "--log_interval", 1]
    steps = [record for record in train_request([*map(str, words)]) if "loss" in record]
    assert len(steps) == 2
    for record in steps:
        losses, tokens = record["loss_by_label"], record["tokens_by_label"]
        assert set(losses) == set(tokens) == (set(LANGUAGES) if more else {"a/in.jsonl", "a/more.jsonl"})
        assert sum(tokens.values()) == 4 * 64
        whole = sum(losses[label] * tokens[label] for label in losses) / (4 * 64)
        assert whole == pytest.approx(record["loss"], abs=1e-5)
        assert len({round(loss, 4) for loss in losses.values()}) == len(losses)
