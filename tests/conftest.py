"""Small real things that many tests need: a tokenizer, Hugging Face models with random weights, text."""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import pytest
import setuptools  # noqa: F401  it refuses to be imported after the distutils that it replaces, which some tests use

from pretrainkit.imports import heavy_imports

VOCAB_SIZE = 320

if not Path("/dev/nvidiactl").exists():
    # Triton reads it when it is first imported, by whichever test comes first.
    os.environ["TRITON_INTERPRET"] = "1"


def text_documents() -> list[str]:
    """Real English: the chapters of the Python language reference that ship with Python."""
    return [text for _, text in sorted(pydoc_data.topics.topics.items())]


@pytest.fixture(scope="session")
def megatron() -> None:
    """Megatron-core, imported as the commands import it: for tests that import its classes by themselves."""
    with heavy_imports():
        import megatron.core  # noqa: F401


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of VOCAB_SIZE ids with <|begin|> (0), <|end|> (1) and <|pad|> (2)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|begin|>", "<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text_documents()[:8], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_hf_llama(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Callable[..., Path]:
    """A factory of Hugging Face Llama folders: hidden 64, 8 heads, 2 key/value heads, random fp32 weights."""

    def make(*, seed: int = 0, **config: Any) -> Path:
        import torch
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        settings: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "tie_word_embeddings": False,
        }
        folder = tmp_path_factory.mktemp("hf_llama")
        model = LlamaForCausalLM(LlamaConfig(**(settings | config)))
        # Norm weights of 1 would hide a norm that is applied twice, or not at all.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A factory of the models of `hf_models`, without tokenizer; the same arguments give the same folder."""
    made: dict[Any, Path] = {}

    def make(name: str, *, dtype: str = "float32", max_shard_size: str = "5GB", **config: Any) -> Path:
        key = (name, dtype, max_shard_size, repr(config))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name)
            seed = zlib.crc32(repr(key).encode())  # whatever models were made before
            hf_models.save_random_model(
                name, made[key], seed=seed, dtype=dtype, max_shard_size=max_shard_size, **config
            )
        return made[key]

    return make


@pytest.fixture(scope="session")
def weights() -> Callable[[Path], dict[str, Any]]:
    """Reads all tensors of a Hugging Face folder, with the safetensors package."""

    def read(folder: Path) -> dict[str, Any]:
        from safetensors.torch import load_file

        return {
            name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()
        }

    return read


@pytest.fixture(scope="session")
def assert_same(weights: Callable[[Path], dict[str, Any]]) -> Callable[[Path, Path], None]:
    """Fails unless two Hugging Face folders hold the same tensors, bit for bit."""

    def check(first: Path, second: Path) -> None:
        import torch

        expected, found = weights(first), weights(second)
        assert found.keys() == expected.keys()
        different = [
            name
            for name, tensor in expected.items()
            if found[name].dtype != tensor.dtype or not torch.equal(found[name], tensor)
        ]
        assert not different

    return check


@pytest.fixture(scope="session")
def jsonl_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty real English documents as JSON lines with a `text` key."""
    path = tmp_path_factory.mktemp("text") / "reference.jsonl"
    lines = (json.dumps({"text": text}) for text in text_documents()[:40])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
