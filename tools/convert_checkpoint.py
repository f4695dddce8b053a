#!/usr/bin/env python
"""Hugging Face model to Megatron-core checkpoint and back, streaming, on CPU, bit for bit.

SOURCE is recognised by what is in it: a Hugging Face folder, a NeMo checkpoint, or Megatron-LM's torch_dist or
torch format. TARGET appears complete or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from pretrainkit.cli import Parser, run_command, value_of
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED
from pretrainkit.imports import heavy_imports
from pretrainkit.jobs.tool_job import add_job_flags, or_submit
from pretrainkit.units import parse_bytes


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("source", type=Path, help="folder to convert")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument(
        "--target-format",
        choices=["nemo", "torch_dist", "torch", "hf"],
        help="default: nemo from a Hugging Face source, hf from any other",
    )
    parser.add_argument(
        "--hf-model", type=Path, help="Hugging Face folder with config and tokenizer, for a source without them"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="cast the weights; default: keep")
    vocabulary = parser.add_argument_group("vocabulary")
    vocabulary.add_argument(
        "--add-tokens",
        type=Path,
        metavar="FILE",
        help="add tokens: one a line of FILE, or objects in a .jsonl file",
    )
    vocabulary.add_argument(
        "--new-token-init",
        default="mean",
        metavar="INIT",
        help="their rows: mean of all tokens', pieces (mean of the pieces of the token's text) or copy:TOKEN",
    )
    cut = parser.add_argument_group("cut of the formats torch (ranks) and, for its arguments, torch_dist")
    cut.add_argument("--target-tensor-parallel-size", type=int, default=1, metavar="TP")
    cut.add_argument("--target-pipeline-parallel-size", type=int, default=1, metavar="PP")
    cut.add_argument(
        "--target-expert-parallel-size",
        type=int,
        default=1,
        metavar="EP",
        help="torch loads on multiples of TP x PP x EP ranks, since TP cuts experts too (Megatron's default for "
        "--expert-tensor-parallel-size); with fewer ranks, or 1 for that, load torch_dist",
    )
    cut.add_argument("--target-first-stage-layers", type=int, metavar="N", help="layers of the first pipeline stage")
    cut.add_argument("--target-last-stage-layers", type=int, metavar="N", help="layers of the last pipeline stage")
    cut.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        metavar="N",
        help="pad the vocabulary to a multiple of N x TP; default: 128 for torch and torch_dist, 1 for nemo",
    )
    cut.add_argument("--iteration", type=int, help="write torch and torch_dist as this iteration, not as a release")
    running = parser.add_argument_group("running")
    running.add_argument("--max-shard-size", type=value_of(parse_bytes), default="5GB", help="largest safetensors file")
    running.add_argument("--workers", type=int, default=min(8, len(os.sched_getaffinity(0))), help="files at a time")
    running.add_argument("--overwrite", action="store_true", help="replace TARGET once the new one is complete")
    running.add_argument(
        "--ignore-config-fields",
        nargs="+",
        default=[],
        metavar="NAME",
        help="unknown fields of config.json that change nothing in the forward pass",
    )
    running.add_argument(
        "--keep-config",
        action="store_true",
        help="copy config.json and tokenizer_config.json byte for byte, not in the spelling of transformers 4 and 5",
    )
    running.add_argument(
        "--allow-nonfinite", action="store_true", help="convert weights with NaN or infinities instead of refusing them"
    )
    running.add_argument(
        "--test-precision",
        action="store_true",
        help="afterwards run both models on CPU and fail unless their logits agree",
    )
    running.add_argument("--json", action="store_true", help="print the report as JSON")
    running.add_argument("--verbose", action="store_true", help="log more")
    running.add_argument("--quiet", action="store_true", help="log warnings only")
    add_job_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Convert, and say what was done."""
    with heavy_imports():
        import torch

    from pretrainkit.checkpoint.added_tokens import read_new_tokens
    from pretrainkit.checkpoint.convert import convert
    from pretrainkit.checkpoint.parallel import Parallelism
    from pretrainkit.checkpoint.plan import CheckpointFormat, Options
    from pretrainkit.release.models import convert_and_check

    options = Options(
        to=CheckpointFormat(arguments.target_format) if arguments.target_format else None,
        hf_folder=arguments.hf_model,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        parallelism=Parallelism(
            arguments.target_tensor_parallel_size,
            arguments.target_pipeline_parallel_size,
            arguments.target_expert_parallel_size,
            arguments.target_first_stage_layers,
            arguments.target_last_stage_layers,
        ),
        vocabulary_divisor=arguments.make_vocab_size_divisible_by,
        iteration=arguments.iteration,
        max_shard_bytes=arguments.max_shard_size,
        workers=arguments.workers,
        overwrite=arguments.overwrite,
        ignore_config_fields=tuple(arguments.ignore_config_fields),
        allow_nonfinite=arguments.allow_nonfinite,
        keep_config=arguments.keep_config,
        new_tokens=read_new_tokens(arguments.add_tokens, arguments.new_token_init) if arguments.add_tokens else (),
    )
    if arguments.test_precision:
        report, checks = convert_and_check(arguments.source, arguments.target, options)
    else:
        report, checks = convert(arguments.source, arguments.target, options), []
    if arguments.json:
        print(json.dumps({**asdict(report), "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        print(report.as_text())
        for check in checks:
            print(f"  {'ok' if check.passed else 'FAILED'}: {check.name}: {check.found}")
    return EXIT_DONE if all(check.passed for check in checks) else EXIT_FAILED


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = build_parser()
    return run_command(or_submit(run, __file__, argv), parser, argv)


if __name__ == "__main__":
    sys.exit(main())
