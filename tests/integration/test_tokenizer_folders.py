"""Tokenizer folders of every form, through make_shards.py: ids and template are those of AutoTokenizer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import other_transformers
import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
TEXTS = ["An example", " one", "I'm 123", "a<|more|>b", "e\u0301<|end|>"]
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
LLAMA = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
FORMS: dict[str, dict[str, Any]] = {
    "bos that the template doesn't add": {"tokenizer_config": LLAMA | {"add_bos_token": True, "add_eos_token": True}},
    "added_tokens.json": {"tokenizer_config": FAST | {"eos_token": "<|end|>"}, "added_tokens": {"<|more|>": 320}},
    "special_tokens_map.json against the config": {
        "tokenizer_config": FAST | {"eos_token": "<|end|>"},
        "special_tokens_map": {"eos_token": "<|pad|>"},
    },
    "special_tokens_map.json alone": {
        "special_tokens_map": {"eos_token": "<|pad|>"},
        "config": {"model_type": "llama"},
    },
    "a class that builds its own": {"tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>"}},
    "no eos": {"tokenizer_config": FAST | {"eos_token": None}},
}


def folder_of(form: str, tokenizer_folder: Path, folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(tokenizer_folder / "tokenizer.json", folder)
    for name, content in FORMS[form].items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def shard_of(tokenizer: Path, tmp_path: Path, *flags: str, **environment: str) -> tuple[list[list[int]], str]:
    """The ids of TEXTS that make_shards.py writes, and its log."""
    (tmp_path / "in").mkdir(exist_ok=True)
    (tmp_path / "in/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    command = [sys.executable, ROOT / "tools/make_shards.py", "--shard_id", "0", "--input_dir", tmp_path / "in"]
    command += ["--output_dir", tmp_path / "out", "--model_id", tokenizer, "--workers", "1"]
    command += ["--special_tokens_in_text", "encode", *flags]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")} | environment
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "out/shard-00000.tar") as tar:
        ids = [json.load(tar.extractfile(name)) for name in tar.getnames() if "token_ids" in name]  # type: ignore[arg-type]
    return ids, done.stderr


@pytest.mark.parametrize("form", FORMS)
def test_ids_are_those_of_auto_tokenizer(form: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = folder_of(form, tokenizer_folder, tmp_path / "tokenizer")
    upstream = AutoTokenizer.from_pretrained(folder)
    flags = ["--append_eod"] if upstream.eos_token_id is not None else []
    ids, log = shard_of(folder, tmp_path, *flags)
    assert ids == [[*upstream(text)["input_ids"], *[upstream.eos_token_id] * len(flags)] for text in TEXTS]
    assert ("transformers 4 does" in log) == (form == "bos that the template doesn't add")
    assert ("changes what tokenizer.json says" in log) == (form in ("added_tokens.json", "a class that builds its own"))


def test_the_template_is_that_of_the_installed_generation(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = folder_of("bos that the template doesn't add", tokenizer_folder, tmp_path / "tokenizer")
    here, _ = shard_of(folder, tmp_path)
    shutil.rmtree(tmp_path / "out")
    there, _ = shard_of(folder, tmp_path, PYTHONPATH=str(other_transformers.packages_folder()))
    framed, plain = (here, there) if other_transformers.OTHER == 5 else (there, here)
    assert framed == [[0, *ids, 1] for ids in plain]


def test_a_folder_with_code_is_refused_and_asks_nothing(tokenizer_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    path = tmp_path / "tokenizer/tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "tokenizer_class": "Mine",
        "auto_map": {"AutoTokenizer": [None, "mine.Mine"]},
    }
    path.write_text(json.dumps(config))
    (tmp_path / "tokenizer/mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    command = [sys.executable, ROOT / "tools/preprocess_data.py", "--input", tmp_path / "a.jsonl"]
    command += ["--output-prefix", tmp_path / "out", "--tokenizer-model", tmp_path / "tokenizer"]
    done = subprocess.run([str(word) for word in command], input="y\ny\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "trust_remote_code" in done.stderr or "custom code" in done.stderr
    assert not (tmp_path / "ran").exists()
