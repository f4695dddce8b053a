"""Prepared data is what megatron-core's own classes write and read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("megatron")]
ROOT = Path(__file__).parents[2]


def test_a_pair_is_byte_identical_to_megatrons_builder(
    tmp_path: Path, tokenizer_folder: Path, jsonl_file: Path
) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    command = [sys.executable, ROOT / "tools/preprocess_data.py", "--input", jsonl_file, "--append-eod"]
    command += ["--output-prefix", tmp_path / "ours", "--tokenizer-model", tokenizer_folder, "--workers", 2]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--json-keys", "text", "--log-interval", 10]
    subprocess.run([str(word) for word in command], check=True, env=os.environ)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(len(tokenizer)))
    documents = []
    for line in jsonl_file.read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        documents.append(ids)
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for kind in ("bin", "idx"):
        assert (tmp_path / f"ours_text_document.{kind}").read_bytes() == (tmp_path / f"theirs.{kind}").read_bytes()
    dataset = IndexedDataset(str(tmp_path / "ours_text_document"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents


def test_a_join_is_byte_identical_to_megatrons(tmp_path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from pretrainkit.data.indexed.merge import merge

    parts = []
    for number, documents in enumerate(([[2, 1], [3]], [], [[3, 3, 3]] * 4)):
        prefix = tmp_path / f"part{number}"
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
        for lengths in documents:  # sequences within a document
            builder.add_document(torch.arange(sum(lengths)), lengths)
        builder.finalize(f"{prefix}.idx")
        parts.append(prefix)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    for prefix in parts:
        if prefix.with_suffix(".bin").stat().st_size:  # Megatron's own reader can't open an empty part
            builder.add_index(str(prefix))
    builder.finalize(str(tmp_path / "theirs.idx"))
    merge(parts, tmp_path / "ours")
    for kind in ("bin", "idx"):
        assert (tmp_path / f"ours.{kind}").read_bytes() == (tmp_path / f"theirs.{kind}").read_bytes()


@pytest.mark.parametrize("command", ["show", "stats", "verify", "count", "merge", "blend"])
def test_inspection_commands_answer_in_words_and_in_json(
    tmp_path: Path, tokenizer_folder: Path, jsonl_file: Path, command: str
) -> None:
    def tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, ROOT / f"tools/{name}.py", *arguments]
        return subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd=tmp_path)

    made = tool("preprocess_data", "--input", jsonl_file, "--output-prefix", "a", "--tokenizer-model", tokenizer_folder)
    assert made.returncode == 0, made.stderr
    arguments = {
        "show": ["a_text_document", "--documents", "1:3"],
        "stats": ["."],
        "verify": ["a_text_document"],
        "count": ["a_text_document", "--sequence_length", 64, "-g", 2, "--split", "90,10,0"],
        "merge": ["--input", "a_text_document", "--output-prefix", "b", "--overwrite"],
        "blend": ["x=a_text_document:2", "--output", "mix.json", "--overwrite"],
    }[command]
    words = tool("inspect_data", command, *arguments)
    assert words.returncode == 0, words.stderr
    assert words.stdout
    structured = tool("inspect_data", command, *arguments, "--json")
    for line in structured.stdout.splitlines() if command == "show" else [structured.stdout]:
        json.loads(line)
    if command == "verify":
        (tmp_path / "a_text_document.bin").write_bytes(b"xx")
        assert tool("inspect_data", "verify", "a_text_document").returncode == 1
