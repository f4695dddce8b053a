#!/usr/bin/env python
"""What the demo's training changed: both models read from their Hugging Face folders, compared by transformers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pretrainkit.cli import Parser, run_command
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED
from pretrainkit.run.json_lines import read_records

PROMPT = "The with statement is used to wrap the execution of a block"
SEQUENCE_LENGTH = 128
NUM_SEQUENCES = 16


def build_parser() -> Parser:
    parser = Parser(prog="report.py", description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="Hugging Face folder the training started from")
    parser.add_argument("--after", type=Path, required=True, help="Hugging Face folder of the trained model")
    parser.add_argument("--text", type=Path, required=True, help="JSONL whose last tenth was held out")
    parser.add_argument("--experiment", type=Path, required=True, help="experiment folder with metrics.jsonl")
    return parser


def command(arguments: argparse.Namespace) -> int:
    before, after = (evaluate(folder, arguments.text) for folder in (arguments.before, arguments.after))
    records = read_records(arguments.experiment / "metrics.jsonl")
    steps = {record["step"]: record for record in records if "loss" in record}
    first, last = steps[min(steps)], steps[max(steps)]
    rate = median(record["tokens_per_second"] for record in steps.values())
    rows = [
        (
            "loss while training",
            f"{first['loss']:.4f} at step {first['step']}",
            f"{last['loss']:.4f} at step {last['step']}",
        ),
        ("loss on training text", f"{before['training_loss']:.4f}", f"{after['training_loss']:.4f}"),
        ("loss on held-out text", f"{before['held_out_loss']:.4f}", f"{after['held_out_loss']:.4f}"),
        ("tokens/s (median)", "", f"{rate:.0f}"),
        ("experiment", "", str(arguments.experiment)),
        ("model", str(arguments.before), str(arguments.after)),
    ]
    print(f"prompt  {PROMPT!r}\nbefore  {before['text']!r}\nafter   {after['text']!r}\n")
    print(f"{'':30}{'before':40}after")
    for name, old, new in rows:
        print(f"{name:30}{old:40}{new}")
    if not all(after[name] < before[name] for name in ("training_loss", "held_out_loss")):
        print("report.py: the losses did not fall", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_DONE


def evaluate(folder: Path, text: Path) -> dict[str, Any]:
    """The mean loss per token on text that was trained on and on text held out, and what is written after PROMPT."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()]
    held_out = len(documents) // 10

    def loss(some: list[str]) -> float:
        tokens = tokenizer("\n".join(some), return_tensors="pt").input_ids[0, : NUM_SEQUENCES * SEQUENCE_LENGTH]
        batch = tokens.view(-1, SEQUENCE_LENGTH)
        return float(model(batch, labels=batch).loss)

    prompt = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        written = model.generate(**prompt, max_new_tokens=32, do_sample=False, pad_token_id=model.config.pad_token_id)
        return {
            "training_loss": loss(documents[:-held_out]),
            "held_out_loss": loss(documents[-held_out:]),
            "text": tokenizer.decode(written[0, prompt.input_ids.size(1) :]),
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(command, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
