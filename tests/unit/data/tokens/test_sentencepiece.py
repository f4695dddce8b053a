"""Tokenizers that come as SentencePiece's tokenizer.model, of Llama 2 and Mistral: read through transformers."""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import shutil
from pathlib import Path
from typing import Any

import pytest

from pretrainkit.data.tokens.encoder import ReferenceEncoder
from pretrainkit.data.tokens.tokenizer import load_tokenizer
from pretrainkit.errors import RequestError

TEXTS = ["An example.", "  two  spaces", "line\nbreak\ttab", "日本語 and é, ü", "", "0123456789"]


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokenizer.model and its config, as Llama 2's."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text.txt").write_text("\n".join(sorted(pydoc_data.topics.topics.values())[:20]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    )
    return folder


def _ids(tokenizer: Any) -> list[list[int]]:
    encoder = ReferenceEncoder(str(tokenizer.json_path), special_tokens=False)
    return [encoder.encode([text])[0].tolist() for text in TEXTS]


def test_a_model_of_sentencepiece_alone_gives_its_ids(slow_folder: Path) -> None:
    import sentencepiece

    tokenizer = load_tokenizer(slow_folder)
    assert (tokenizer.num_ids, tokenizer.bos_id, tokenizer.eod_id) == (400, 1, 2)
    model = sentencepiece.SentencePieceProcessor(model_file=str(slow_folder / "tokenizer.model"))
    assert _ids(tokenizer) == [model.encode(text) for text in TEXTS]


def test_a_folder_whose_config_asks_for_a_prefix_space_is_made_anew(slow_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(slow_folder).save_pretrained(tmp_path / "fast")
    config = json.loads((tmp_path / "fast" / "tokenizer_config.json").read_text())
    (tmp_path / "fast" / "tokenizer_config.json").write_text(json.dumps(config | {"add_prefix_space": True}))
    shutil.copy(slow_folder / "tokenizer.model", tmp_path / "fast")
    upstream = AutoTokenizer.from_pretrained(tmp_path / "fast")
    assert _ids(load_tokenizer(tmp_path / "fast")) == [
        upstream.encode(text, add_special_tokens=False) for text in TEXTS
    ]


def test_a_package_that_fails_is_not_a_missing_tokenizer(
    slow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text("raise RuntimeError('Detected incompatible Protobuf versions')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(
        RequestError, match=r"transformers can't load the tokenizer: .*Detected incompatible"
    ) as refused:
        load_tokenizer(slow_folder)
    assert "a folder with tokenizer.json" not in str(refused.value)
