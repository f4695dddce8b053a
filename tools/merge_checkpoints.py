#!/usr/bin/env python
"""Weighted average of checkpoints, streaming, on CPU: of the last ones of a run in place of learning-rate decay.

Each CHECKPOINT is of any format that convert_checkpoint.py reads. With --last or --steps it is one folder with the
checkpoints of a run, such as experiments/NAME. Weights are accumulated in fp32. TARGET appears complete or not at all,
and states what it is the average of.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from pretrainkit.cli import Parser, run_command, value_of
from pretrainkit.errors import EXIT_DONE, RequestError
from pretrainkit.imports import heavy_imports
from pretrainkit.jobs.tool_job import add_job_flags, or_submit
from pretrainkit.units import parse_bytes


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkpoint", type=Path, nargs="+", help="checkpoints to average, oldest first; or one run")
    parser.add_argument("target", type=Path, help="folder to write")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=int, metavar="N", help="the newest N complete checkpoints of a run")
    which.add_argument("--steps", type=int, nargs="+", metavar="STEP", help="the checkpoints of a run at these steps")
    weights = parser.add_argument_group("weights; default: all equal")
    weights.add_argument(
        "--weights",
        type=float,
        nargs="+",
        metavar="W",
        help="one for each checkpoint, in order; scaled to add up to 1",
    )
    weights.add_argument(
        "--ema-decay",
        type=float,
        metavar="D",
        help="exponential moving average, of which D is kept after --ema-interval steps",
    )
    weights.add_argument("--ema-interval", type=int, default=1, metavar="STEPS", help="optimizer steps of --ema-decay")
    parser.add_argument(
        "--target-format", choices=["hf", "nemo", "torch_dist", "torch"], help="default: the format of the last one"
    )
    parser.add_argument(
        "--hf-model", type=Path, help="Hugging Face folder with config and tokenizer, for checkpoints without them"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the average; default: keep")
    cut = parser.add_argument_group("cut of the format torch")
    cut.add_argument("--target-tensor-parallel-size", type=int, default=1, metavar="TP")
    cut.add_argument("--target-pipeline-parallel-size", type=int, default=1, metavar="PP")
    cut.add_argument("--target-expert-parallel-size", type=int, default=1, metavar="EP")
    cut.add_argument("--make-vocab-size-divisible-by", type=int, metavar="N", help="as in convert_checkpoint.py")
    running = parser.add_argument_group("running")
    running.add_argument("--max-shard-size", type=value_of(parse_bytes), default="5GB", help="largest safetensors file")
    running.add_argument("--workers", type=int, default=min(8, len(os.sched_getaffinity(0))), help="files at a time")
    running.add_argument("--overwrite", action="store_true", help="replace TARGET once the new one is complete")
    running.add_argument("--ignore-config-fields", nargs="+", default=[], metavar="NAME")
    running.add_argument("--allow-nonfinite", action="store_true", help="write NaN and infinities, and report them")
    running.add_argument("--json", action="store_true", help="print the report as JSON")
    running.add_argument("--verbose", action="store_true", help="log more")
    running.add_argument("--quiet", action="store_true", help="log warnings only")
    add_job_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Average, and say of what."""
    if arguments.weights and arguments.ema_decay is not None:
        raise RequestError("--weights and --ema-decay", needed="one of them")
    with heavy_imports():
        import torch

    from pretrainkit.checkpoint.convert import convert
    from pretrainkit.checkpoint.merge import Rule, average_of
    from pretrainkit.checkpoint.parallel import Parallelism
    from pretrainkit.checkpoint.plan import CheckpointFormat, Options
    from pretrainkit.run.saved_steps import choose_checkpoints

    paths = arguments.checkpoint
    if arguments.last is not None or arguments.steps:
        if len(paths) > 1:
            raise RequestError(f"{len(paths)} folders with --last or --steps", needed="one: the folder of a run")
        paths = choose_checkpoints(paths[0], last=arguments.last, steps=arguments.steps or ())
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    found = average_of(
        paths,
        Rule(tuple(arguments.weights) if arguments.weights else None, arguments.ema_decay, arguments.ema_interval),
        hf_folder=arguments.hf_model,
        dtype=dtype,
        ignore_config_fields=arguments.ignore_config_fields,
    )
    options = Options(
        to=CheckpointFormat(arguments.target_format) if arguments.target_format else found.format,
        hf_folder=arguments.hf_model,
        dtype=dtype,
        parallelism=Parallelism(
            arguments.target_tensor_parallel_size,
            arguments.target_pipeline_parallel_size,
            arguments.target_expert_parallel_size,
        ),
        vocabulary_divisor=arguments.make_vocab_size_divisible_by,
        max_shard_bytes=arguments.max_shard_size,
        workers=arguments.workers,
        overwrite=arguments.overwrite,
        ignore_config_fields=tuple(arguments.ignore_config_fields),
        allow_nonfinite=arguments.allow_nonfinite,
    )
    report = convert(found, arguments.target, options)
    print(json.dumps(asdict(report), indent=2) if arguments.json else report.as_text())
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return run_command(or_submit(run, __file__, argv), build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
