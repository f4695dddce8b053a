"""A real model, SmolLM2-135M, through every format and back: the same bits, files and words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.data.tokens import gguf
from pretrainkit.data.tokens.encoder import EngineSpec, load_encoder

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]


def generate(folder: Path) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    tokens = AutoModelForCausalLM.from_pretrained(folder).generate(**prompt, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(tokens[0])


def test_smollm2_comes_back_from_every_format(assert_same: Callable[[Path, Path], None], tmp_path: Path) -> None:
    command = [sys.executable, "scripts/demo/make_inputs.py", "--output", str(tmp_path)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    source = tmp_path / "smollm2-135m"
    # Nine heads of three groups and thirty layers: TP=3, and stages of 6, 9, 9 and 6 layers.
    cut = Parallelism(3, 4, 1, 6, 6)
    convert(source, tmp_path / "torch", Options(to=CheckpointFormat.TORCH, parallelism=cut, workers=2))
    convert(tmp_path / "torch", tmp_path / "torch_dist", Options(to=CheckpointFormat.TORCH_DIST, workers=2))
    convert(tmp_path / "torch_dist", tmp_path / "nemo", Options(to=CheckpointFormat.NEMO, workers=2))
    convert(tmp_path / "nemo", tmp_path / "back", Options(workers=2, keep_config=True))
    assert_same(source, tmp_path / "back")
    for path in source.iterdir():
        # What transformers saves as tokenizer.model is the GGUF file with all the weights.
        if path.suffix != ".safetensors" and path.name != "tokenizer.model":
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name
    assert not (tmp_path / "back" / "tokenizer.model").exists()
    path = tmp_path / "back" / "tokenizer.json"
    ids = gguf.ids_with_template(load_encoder(EngineSpec("tokenizers", str(path), special_tokens=False)), path)
    assert ids and gguf.pre_tokenizer(ids) == "smollm", "llama.cpp's converter to GGUF knows it"
    words = generate(tmp_path / "back")
    assert words == generate(source) and "Paris" in words
