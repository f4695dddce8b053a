"""--decontaminate: documents that overlap with evaluation sets are left out or named, by all three tools."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import preprocess_runs
import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
NUM_LEAKS = 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluation sets in evals/, and a corpus with a leak of 13 words or 26 characters in every third document."""
    folder, chance = tmp_path_factory.mktemp("corpus"), random.Random(7)
    words = [f"word{i}" for i in range(900)]
    kanji = [chr(0x4E00 + i) for i in range(900)]

    def text(count: int, *, is_japanese: bool) -> str:
        return "".join(chance.choices(kanji, k=2 * count)) if is_japanese else " ".join(chance.choices(words, k=count))

    (folder / "evals/ja").mkdir(parents=True)
    english = [text(20, is_japanese=False) for _ in range(NUM_LEAKS)]
    japanese = [text(20, is_japanese=True) for _ in range(NUM_LEAKS)]
    (folder / "evals/quiz.jsonl").write_text("".join(json.dumps({"question": leak}) + "\n" for leak in english))
    (folder / "evals/ja/quiz.txt.gz").write_bytes(gzip.compress("\n".join(japanese).encode()))
    records = []
    for leak in english + japanese:
        is_japanese = leak in japanese
        part = leak[5:31] if is_japanese else ",\n".join(leak.split(" ")[4:17]).upper()
        before, after = (text(chance.randrange(80), is_japanese=is_japanese) for _ in range(2))
        for document in (f"{before} {part} {after}", text(100, is_japanese=is_japanese), text(3, is_japanese=False)):
            records.append({"text": document, "leaked": document.startswith(f"{before} {part}")})
    chance.shuffle(records)
    (folder / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def leaked_lines(corpus: Path) -> list[int]:
    lines = (corpus / "in.jsonl").read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if json.loads(line)["leaked"]]


def preprocess(folder: Path, tokenizer: Path, *arguments: object) -> dict[str, Any]:
    code, errors = preprocess_runs.finish(preprocess_runs.start(folder, tokenizer, "--overwrite", *arguments))
    assert code == 0, errors
    return json.loads((folder / "out_text_document.manifest.json").read_text())


@pytest.mark.parametrize("action", ["drop", "report"])
def test_every_leak_is_found_named_and_counted(
    tokenizer_folder: Path, corpus: Path, tmp_path: Path, action: str
) -> None:
    arguments = ("--input", corpus / "in.jsonl", "--decontaminate", corpus / "evals", "--decontaminate-action", action)
    manifest = preprocess(tmp_path, tokenizer_folder, *arguments)
    num_dropped = 2 * NUM_LEAKS if action == "drop" else 0
    assert manifest["num_records"] == 6 * NUM_LEAKS == manifest["num_documents"] + num_dropped
    assert manifest["num_contaminated"] == num_dropped
    assert manifest["decontamination"]["overlaps"] == {"quiz": NUM_LEAKS, "ja/quiz": NUM_LEAKS}
    entries = [json.loads(line) for line in (tmp_path / "out.rejects.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in entries] == leaked_lines(corpus)
    assert {entry["found"].split(":")[0] for entry in entries} == {"overlaps with quiz", "overlaps with ja/quiz"}
    assert all(("record" in entry) == (action == "drop") for entry in entries)
    lines = (corpus / "in.jsonl").read_text().splitlines(keepends=True)
    clean = [line for line in lines if action == "report" or not json.loads(line)["leaked"]]
    (tmp_path / "clean.jsonl").write_text("".join(clean))
    found = [(tmp_path / f"out_text_document.{kind}").read_bytes() for kind in ("bin", "idx")]
    assert preprocess(tmp_path, tokenizer_folder, "--input", "clean.jsonl")["decontamination"] == {}
    assert found == [(tmp_path / f"out_text_document.{kind}").read_bytes() for kind in ("bin", "idx")]


@pytest.mark.parametrize("tool", ["make_shards", "pack_dataset"])
def test_shards_and_packed_sets_leave_out_the_same(
    tokenizer_folder: Path, corpus: Path, tmp_path: Path, tool: str
) -> None:
    names = {"make_shards": ("input_dir", "model_id"), "pack_dataset": ("input", "tokenizer_model")}[tool]
    command = [sys.executable, ROOT / f"tools/{tool}.py", f"--{names[0]}", corpus / "in.jsonl", "--output_dir", "out"]
    command += [f"--{names[1]}", tokenizer_folder, "--decontaminate", corpus / "evals", "--json"]
    command += ["--all"] if tool == "make_shards" else ["--sequence_length", "16"]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=120)

    done = run()
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    record = record[0] if tool == "make_shards" else record["documents"]
    assert (record["num_records"], record["num_contaminated"]) == (6 * NUM_LEAKS, 2 * NUM_LEAKS)
    rejects = tmp_path / ("out/shard-00000.rejects.jsonl" if tool == "make_shards" else "out/rejects.jsonl")
    assert [json.loads(line)["line"] for line in rejects.read_text().splitlines()] == leaked_lines(corpus)
    command += ["--decontaminate_words", "12"]
    assert run().returncode == 2, "a set made with other evaluation sets is another set"


def test_unfinished_work_is_continued_with_the_same_evaluation_sets_only(
    tokenizer_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    bad = '{"text": 5}\n'
    (tmp_path / "in.jsonl").write_text((corpus / "in.jsonl").read_text() + bad)
    arguments = ["--input", "in.jsonl", "--decontaminate", corpus / "evals"]
    code, _ = preprocess_runs.finish(preprocess_runs.start(tmp_path, tokenizer_folder, *arguments))
    assert code == 1
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals/quiz.jsonl").write_bytes((corpus / "evals/quiz.jsonl").read_bytes())
    arguments = ["--input", "in.jsonl", "--on-error", "skip", "--decontaminate", "evals"]
    code, errors = preprocess_runs.finish(preprocess_runs.start(tmp_path, tokenizer_folder, *arguments))
    assert (code, "unfinished work of another request" in errors) == (0, True), errors
    manifest = json.loads((tmp_path / "out_text_document.manifest.json").read_text())
    assert (manifest["num_contaminated"], manifest["num_rejected"]) == (NUM_LEAKS, 1)
