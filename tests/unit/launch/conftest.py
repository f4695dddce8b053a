"""A model folder and a dataset, made without torch or transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
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
