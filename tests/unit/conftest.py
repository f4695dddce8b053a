"""Fixtures that unit tests of several packages share: golden texts, folders of models and data, runs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from indexed_writer import IndexedDatasetWriter
from tiny_runs import tiny_run

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.run import checkpoints
from pretrainkit.run.folder import RunFolder

REPOSITORY = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "golden"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
WORDS = ["<|end|>", "<unk>", *(f"w{number}" for number in range(98))]
MakePair = Callable[..., Path]


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME; UPDATE_GOLDEN=1 in the environment writes it instead."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"if the change is wanted: UPDATE_GOLDEN=1 pytest, then {path}"

    return compare


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of a tiny Llama with a word-level tokenizer of 100 ids; no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("hf") / "tiny"
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|end|>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="session")
def dataset_folder(tmp_path_factory: pytest.TempPathFactory, hf_folder: Path) -> Path:
    """One pair of 100 documents of 100 words and an EOD each, with its manifest."""
    folder = tmp_path_factory.mktemp("data") / "prepared"
    text = folder.with_name("text.jsonl")
    documents = ({"text": " ".join(f"w{(number + word) % 98}" for word in range(100))} for number in range(100))
    text.write_text("".join(json.dumps(document) + "\n" for document in documents))
    command = [sys.executable, str(REPOSITORY / "tools" / "preprocess_data.py"), "--input", str(text)]
    command += ["--output-prefix", str(folder / "words"), "--tokenizer-model", str(hf_folder), "--append-eod"]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def make_pair(tmp_path: Path) -> MakePair:
    """Write documents under a name; gives the prefix."""

    def make(name: str, documents: Sequence[Sequence[int]], dtype: type = np.uint16) -> Path:
        with IndexedDatasetWriter(tmp_path / name, np.dtype(dtype)) as writer:
            for ids in documents:
                writer.add_document(ids)
        return tmp_path / name

    return make


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., ResolvedRun]:
    """A factory of runs of 10 samples an epoch and 4 a step; keyword arguments change the training's settings."""
    return functools.partial(tiny_run, tmp_path)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., checkpoints.Checkpoint]:
    """Write a complete checkpoint of 4 samples a step; keyword arguments change its commit mark."""

    def write(step: int, *, optimizer: bool = True, state: str = "param", **mark: Any) -> checkpoints.Checkpoint:
        folder = RunFolder(tmp_path).checkpoint(step)
        (folder / "weights").mkdir(parents=True)
        names = f"module.w optimizer.state.exp_avg.w optimizer.state.{state}.w" if optimizer else "module.w"
        (folder / "weights" / ".metadata").write_text(names)
        known = {"step": step, "consumed_samples": 4 * step, "global_batch_size": 4} | mark
        checkpoints.commit(checkpoints.Checkpoint(folder, **known))
        return checkpoints.read(folder)

    return write
