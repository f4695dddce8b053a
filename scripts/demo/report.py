#!/usr/bin/env python
"""What the demo's training changed: both models read from their Hugging Face folders, compared by transformers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from pretrainkit.cli import Parser, run_command
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED

PROMPT = "The with statement is used to wrap the execution of a block"
SEQUENCE_LENGTH = 128
NUM_SEQUENCES = 64
MEAN_OVER = 6
"""Steps: one step's loss says more about its few samples than about the model."""


def build_parser() -> Parser:
    parser = Parser(prog="report.py", description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="Hugging Face folder the training started from")
    parser.add_argument("--after", type=Path, required=True, help="Hugging Face folder of the trained model")
    parser.add_argument("--text", type=Path, required=True, help="JSONL whose last tenth was held out")
    parser.add_argument("--experiment", type=Path, required=True, help="experiment folder with metrics.jsonl")
    return parser


def command(arguments: argparse.Namespace) -> int:
    before, after = (evaluate(folder, arguments.text) for folder in (arguments.before, arguments.after))
    lines = (arguments.experiment / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = {record["step"]: record for record in map(json.loads, lines) if "loss" in record}
    losses = [steps[step]["loss"] for step in sorted(steps)]
    first, last = mean(losses[:MEAN_OVER]), mean(losses[-MEAN_OVER:])
    rate = median(record["tokens_per_second"] for record in steps.values())
    rows = [
        ("training loss", f"{losses[0]:.4f} at step {min(steps)}", f"{losses[-1]:.4f} at step {max(steps)}"),
        (f"  mean of {MEAN_OVER} steps", f"{first:.4f}", f"{last:.4f}"),
        ("held-out loss (transformers)", f"{before['loss']:.4f}", f"{after['loss']:.4f}"),
        ("tokens/s (median)", "", f"{rate:.0f}"),
        ("experiment", "", str(arguments.experiment)),
        ("model", str(arguments.before), str(arguments.after)),
    ]
    print(f"prompt  {PROMPT!r}\nbefore  {before['text']!r}\nafter   {after['text']!r}\n")
    print(f"{'':30}{'before':40}after")
    for name, old, new in rows:
        print(f"{name:30}{old:40}{new}")
    if not (last < first and after["loss"] < before["loss"]):
        print("report.py: the losses did not fall", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_DONE


def evaluate(folder: Path, text: Path) -> dict[str, Any]:
    """The mean loss per token on held-out text, and what the model writes after PROMPT, greedily."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    documents = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()]
    held_out = tokenizer("\n".join(documents[-len(documents) // 10 :]), return_tensors="pt").input_ids[0]
    batch = held_out[: NUM_SEQUENCES * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)
    prompt = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        loss = model(batch, labels=batch).loss.item()
        written = model.generate(**prompt, max_new_tokens=32, do_sample=False, pad_token_id=model.config.pad_token_id)
    return {"loss": loss, "text": tokenizer.decode(written[0, prompt.input_ids.size(1) :])}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(command, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
