"""The release gate's check of other programs that open a release: they continue prompts with transformers' tokens.

All compute in fp32 on greedy decoding. llama.cpp reads a GGUF file, which its own converter makes from the release.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrainkit.checkpoint.formats.hf_files import model_class, readable_folder, text_runner
from pretrainkit.data.tokens import gguf
from pretrainkit.data.tokens.encoder import EngineSpec, load_encoder
from pretrainkit.errors import RequestError
from pretrainkit.imports import heavy_imports
from pretrainkit.logs import get_logger
from pretrainkit.release import prompts
from pretrainkit.release.report import Check, collect

NUM_PROMPTS, NUM_TOKENS = 20, 16
"""Prompts, and tokens that continue each."""
CONVERTER = "convert_hf_to_gguf.py"
LLAMA_CPP_VARIABLE = "LLAMA_CPP"
"""Environment variable: a folder with llama.cpp's source, whose converter is used."""

log = get_logger(__name__)


def parse_readers(text: str) -> tuple[str, ...]:
    """The programs of a comma-separated list. Raises ValueError for others."""
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in READERS]:
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(READERS)}")
    return names


def check_installed(names: Sequence[str]) -> None:
    """Raise RequestError unless the programs are installed."""
    problems = []
    for name in names:
        package = {"vllm": "vllm", "llama.cpp": "llama_cpp"}[name]
        if importlib.util.find_spec(package) is None:
            pip = {"vllm": "vllm", "llama.cpp": "llama-cpp-python"}[name]
            problems.append(RequestError(f"{name} is not installed", action=f"pip install {pip}", where="--also"))
        elif name == "llama.cpp" and _converter() is None:
            problems.append(
                RequestError(
                    f"no {CONVERTER}, with which llama.cpp's source converts models to GGUF",
                    action=f"put it on PATH, or name the folder of the source: {LLAMA_CPP_VARIABLE}=/path/to/llama.cpp",
                    where="--also",
                )
            )
    RequestError.raise_all(problems)


def check_readers(released: Path, names: Sequence[str]) -> list[Check]:
    """Have each program continue the prompts, and compare with transformers; any error is a failed check."""
    folder = Path(readable_folder(released.absolute()))
    texts, expected = prompts.short_texts(NUM_PROMPTS), list[tuple[list[int], list[int]]]()
    checks = collect("transformers continues prompts", _expect(folder, texts, expected))
    for name in names if len(expected) == len(texts) else ():
        log.info("running %s in %s", released, name)
        checks += collect(f"{name} opens it", READERS[name](folder, texts, expected))
    return checks


def _expect(folder: Path, texts: list[str], expected: list[tuple[list[int], list[int]]]) -> Iterator[Check]:
    """Add each prompt's ids and their continuation."""
    with heavy_imports():
        import torch
        from transformers import AutoTokenizer, GenerationConfig

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = text_runner(model_class(folder).from_pretrained(folder, dtype=torch.float32, **options)).eval()
    model.generation_config = GenerationConfig()  # without the model's own end and sampling
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            whole = model.generate(torch.tensor([ids]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        expected.append((ids, whole[0, len(ids) :].tolist()))
    yield from ()


def _judge(name: str, expected: list[tuple[list[int], list[int]]], found: list[list[int]]) -> Check:
    different = [
        f"prompt {number}: {tokens[:8]} and not {wanted[:8]}"
        for number, ((_, wanted), tokens) in enumerate(zip(expected, found, strict=True), 1)
        if tokens != wanted
    ]
    fine = f"{NUM_TOKENS} tokens after each of {len(expected)} prompts, fp32"
    return Check.of(f"{name} gives the greedy tokens of transformers", different, fine)


def _check_llama_cpp(folder: Path, texts: list[str], expected: list[tuple[list[int], list[int]]]) -> Iterator[Check]:
    path = folder / "tokenizer.json"
    ids = gguf.ids_with_template(load_encoder(EngineSpec("tokenizers", str(path), special_tokens=True)), path)
    if ids is not None:
        note = gguf.unknown_note(ids)
        yield Check("llama.cpp's converter knows the pre-tokenizer", not note, note or f"{gguf.pre_tokenizer(ids)}")
        if note:
            return
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.gguf"
        converter = _converter()
        assert converter, "check_installed has found it"
        command = [sys.executable, str(converter), str(folder), "--outtype", "f32", "--outfile", str(file)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        words = done.stdout.strip().splitlines()[-1:] or ["no words"]
        fine = f"{file.stat().st_size} bytes" if file.is_file() else words[0]
        yield Check(
            "llama.cpp's converter makes a GGUF file", done.returncode == 0, fine if not done.returncode else words[0]
        )
        if done.returncode:
            return
        import llama_cpp

        model = llama_cpp.Llama(
            str(file),
            n_ctx=max(len(ids) for ids, _ in expected) + NUM_TOKENS + 1,
            type_k=llama_cpp.GGML_TYPE_F32,  # by default keys and values are rounded to fp16
            type_v=llama_cpp.GGML_TYPE_F32,
            n_gpu_layers=0,
            verbose=False,
        )
        other = []
        for number, (text, (ids, _)) in enumerate(zip(texts, expected, strict=True), 1):
            tokens = model.tokenize(text.encode(), add_bos=True, special=True)
            if tokens != ids:
                other.append(f"prompt {number}: {tokens[:8]} and not {ids[:8]}")
        yield Check.of("llama.cpp's tokenizer gives the ids of transformers", other, f"{len(texts)} prompts")
        found = []
        for ids, _ in expected:
            model.reset()
            steps = model.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0)
            found.append([next(steps) for _ in range(NUM_TOKENS)])
    yield _judge("llama.cpp", expected, found)


def _check_vllm(folder: Path, _: list[str], expected: list[tuple[list[int], list[int]]]) -> Iterator[Check]:
    import vllm

    longest = max(len(ids) for ids, _ in expected) + NUM_TOKENS
    model = vllm.LLM(str(folder), dtype="float32", enforce_eager=True, max_model_len=longest, seed=0)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = model.generate([{"prompt_token_ids": ids} for ids, _ in expected], sampling)
    yield _judge("vllm", expected, [list(output.outputs[0].token_ids) for output in outputs])


def _converter() -> Path | None:
    folder, found = os.environ.get(LLAMA_CPP_VARIABLE), shutil.which(CONVERTER)
    path = Path(folder) / CONVERTER if folder else Path(found) if found else None
    return path if path and path.is_file() else None


READERS = {"vllm": _check_vllm, "llama.cpp": _check_llama_cpp}
"""The check of each program, by its name in --also."""
