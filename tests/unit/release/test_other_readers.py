"""--also: which programs are known, what is needed for them, and what llama.cpp knows of tokenizers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretrainkit.data.tokens import gguf
from pretrainkit.data.tokens.encoder import EngineSpec, load_encoder
from pretrainkit.errors import RequestError
from pretrainkit.release import other_readers, prompts


def ids_of(tokenizer_json: Path) -> list[int] | None:
    encoder = load_encoder(EngineSpec("tokenizers", str(tokenizer_json), special_tokens=False))
    return gguf.ids_with_template(encoder, tokenizer_json)


def test_unknown_programs_and_missing_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert other_readers.parse_readers("vllm,llama.cpp") == ("vllm", "llama.cpp")
    with pytest.raises(ValueError, match="'ollama' is none of vllm"):
        other_readers.parse_readers("ollama")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(RequestError, match="vllm is not installed") as refusal:
        other_readers.check_installed(["vllm", "llama.cpp"])
    assert "pip install llama-cpp-python" in str(refusal.value)


def test_the_prompts_are_twenty_different_ones() -> None:
    texts = prompts.short_texts(other_readers.NUM_PROMPTS)
    assert len(set(texts)) == other_readers.NUM_PROMPTS and all(texts)


def test_an_unknown_byte_level_tokenizer_is_named_with_its_hash(tokenizer_folder: Path, tmp_path: Path) -> None:
    ids = ids_of(tokenizer_folder / "tokenizer.json")
    assert ids and gguf.pre_tokenizer(ids) is None and "hash" in gguf.unknown_note(ids)
    described = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    described["model"]["byte_fallback"] = True  # as SentencePiece's models have: the converter asks for no hash
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert ids_of(tmp_path / "tokenizer.json") is None and not gguf.unknown_note(None)


def test_a_template_is_part_of_the_hash(tokenizer_folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert ids_of(tmp_path / "tokenizer.json") == tokenizer.encode(gguf.CHECK_TEXT).ids
