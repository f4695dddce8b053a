"""What the three data tools put around every document, and what is said of documents without an end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pretrainkit.data.dataset import read_dataset
from pretrainkit.data.documents import documents_kind
from pretrainkit.data.indexed.format import IndexedDataset

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
TEXTS = ["one two", "three\n", "four five six"]
BOS, EOD = 0, 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A tokenizer that puts BOS before every text, as Llama 3's does."""
    folder = tmp_path_factory.mktemp("with_template") / "tokenizer"
    shutil.copytree(tokenizer_folder, folder)
    description = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [BOS], "tokens": ["<|begin|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(description))
    return folder


@pytest.fixture(scope="module")
def prepare(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Make a form of data with one of the tools; gives its path and what the tool said."""
    text = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def run(form: str, *flags: str) -> tuple[Path, str]:
        out = tmp_path_factory.mktemp(form) / "out"
        words = {
            "pair": ["tools/preprocess_data.py", "--input", text, "--output-prefix", out, "--tokenizer-model"],
            "shards": ["tools/make_shards.py", "--all", "--input_dir", text, "--output_dir", out, "--model_id"],
            "packed": [
                *("tools/pack_dataset.py", "--input", text, "--output_dir", out),
                *("--sequence_length", 2, "--num_proc", 1, "--tokenizer_model"),
            ],
        }[form]
        command = [sys.executable, *map(str, [*words, tokenizer, *flags])]
        done = subprocess.run(command, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return out.with_name("out_text_document") if form == "pair" else out, done.stderr

    return run


def documents(path: Path) -> Iterator[NDArray]:
    kind = documents_kind(path)
    data = kind(path) if kind else IndexedDataset(path)
    pointers = np.cumsum(data.sequence_lengths) - data.sequence_lengths
    for number, (begin, length) in enumerate(zip(pointers, data.sequence_lengths, strict=True)):
        yield data.tokens[begin : begin + length] if isinstance(data, IndexedDataset) else data.get(number)


ENDS = {"pair": ["--append-eod"], "shards": ["--append_eod"], "packed": []}


@pytest.mark.parametrize("special_tokens", ["template", "none"])
def test_one_choice_gives_one_stream_with_all_tools(special_tokens: str, prepare) -> None:  # type: ignore[no-untyped-def]
    streams = []
    for form, flags in ENDS.items():
        path, said = prepare(form, *flags, "--special_tokens", special_tokens)
        found = list(documents(path))
        assert "EOD" not in said and not read_dataset(str(path), "1,0,0").without_eod
        streams.append(np.concatenate(found))
        if form != "packed":  # its last document may be cut
            assert all(ids[-1] == EOD and (ids == EOD).sum() == 1 for ids in found)
            assert all((ids == BOS).sum() == (special_tokens == "template") for ids in found)
    pair, shards, packed = streams
    assert np.array_equal(pair, shards) and np.array_equal(pair[: len(packed)], packed) and len(pair) - len(packed) < 2


@pytest.mark.parametrize("form", ENDS)
def test_documents_without_an_end_are_warned_of(form: str, prepare) -> None:  # type: ignore[no-untyped-def]
    path, said = prepare(form, *(["--no-append_eod"] if form == "packed" else []))
    assert "WARNING documents end without an EOD token" in said
    assert read_dataset(str(path), "1,0,0").without_eod == (str(path),)
