"""Encoding without a pool: what a pool of one worker gives, in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pretrainkit.data.readers.records import RecordRules
from pretrainkit.data.tokens import encode_here
from pretrainkit.data.tokens.encode_here import EncodeHere
from pretrainkit.data.tokens.encoder import Encoder, EngineSpec, ReferenceEncoder
from pretrainkit.data.tokens.parity import EnginesDiffer, ParitySample
from pretrainkit.errors import DataError


@dataclass(frozen=True)
class IdsTask:
    """Gives a text's ids and the process that encoded it."""

    def open(self, encoder: Encoder, worker: int) -> Callable[[str], Any]:
        def encode(text: str) -> Any:
            if text == "large":
                raise MemoryError
            return encoder.encode([text])[0], worker, os.getpid()

        return encode


def spec(folder: Path, name: str = "fastokens") -> EngineSpec:
    return EngineSpec(name, str(folder / "tokenizer.json"), special_tokens=False)


SAMPLE = ParitySample(("<|end|>",), [], [], RecordRules(("text",)))


def children() -> set[int]:
    """Process ids, without Python's tracker of shared memory, which stays, and without zombies of other tests."""
    found = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return {process.pid for process in found if "resource_tracker" not in " ".join(process.cmdline())}


def test_this_process_encodes_and_the_one_that_compares_has_ended(tokenizer_folder: Path) -> None:
    reference = ReferenceEncoder(str(tokenizer_folder / "tokenizer.json"), special_tokens=False)
    before = children()
    with EncodeHere() as encoders:
        assert encoders.start(IdsTask(), spec(tokenizer_folder), sample=SAMPLE).result() == ""
        assert children() <= before
        texts = [f"word {number}" for number in range(20)]
        for wanted, (text, (ids, worker, process)) in zip(texts, encoders.ordered(iter(texts)), strict=True):
            assert (text, worker, process) == (wanted, 0, os.getpid())
            assert np.array_equal(ids, reference.encode([text])[0])


def test_a_difference_is_said(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def encode(self, texts: list[str]) -> tuple[Any, Any]:
            return np.zeros(len(texts), np.uint32), np.arange(len(texts) + 1)

    monkeypatch.setattr(encode_here, "load_tokenizer", lambda _: Wrong())
    with EncodeHere() as encoders:
        difference = encoders.start(IdsTask(), spec(tokenizer_folder), sample=SAMPLE).result()
    assert "tokenizers gives" in difference


def test_tokenizers_is_loaded_after_fastokens_failed(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with EncodeHere() as encoders:
        with pytest.raises(EnginesDiffer, match="fastokens does not load this tokenizer"):
            encoders.start(IdsTask(), spec(tmp_path), sample=SAMPLE)
        with pytest.raises(DataError, match=r"fix tokenizer\.json"):
            encoders.start(IdsTask(), spec(tmp_path, "tokenizers"))
        assert encoders.start(IdsTask(), spec(tokenizer_folder, "tokenizers")).result() == ""
        assert len(list(encoders.ordered(["a", "b"]))) == 2


def test_memory_that_ran_out_is_an_error_of_the_data(tokenizer_folder: Path) -> None:
    with EncodeHere() as encoders:
        encoders.start(IdsTask(), spec(tokenizer_folder))
        with pytest.raises(DataError, match=r"out of memory(.|\n)*--max-doc-bytes"):
            list(encoders.ordered(["large"]))
