#!/usr/bin/env python
"""Text to Megatron's .bin/.idx pairs: JSON Lines (plain, gz, zst, xz, bz2), text, Parquet or saved Arrow datasets.

Safe to stop at any moment: the same command continues where it was, and outputs appear whole or not at all.
A manifest with each pair says what it was made from and how.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict

from pretrainkit.cli import Parser, run_command
from pretrainkit.data.flags import DataFlags, request_fields
from pretrainkit.jobs.tool_job import add_job_flags, or_submit


def build_parser() -> Parser:
    """The command's flags; those that Megatron's tool has keep their names."""
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    flags = DataFlags(unit="document", separator="-")
    what = parser.add_argument_group("input and output")
    flags.add_input(what, "input", "files, folders or globs, read in natural order")
    what.add_argument("--output-prefix", required=True, help="writes OUTPUT_PREFIX_KEY_document.{bin,idx}")
    what.add_argument("--json-keys", nargs="+", default=["text"], help="keys or columns to encode, a pair each")
    labels = "key or column (`a.b`: b in the object under a) with a document's label, such as its language: runs show "
    what.add_argument("--label-key", default="", metavar="KEY", help=f"{labels}their loss for each label")
    what.add_argument("--per-file", action="store_true", help="one output per input file, under OUTPUT_PREFIX")
    what.add_argument("--shard", metavar="I/N", help="only part I of N; `array`: from the scheduler's variables")
    flags.add_overwrite(what, "replace existing output once the new one is complete")
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument("--tokenizer-model", required=True, help="Hugging Face folder, tokenizer.json or hub id")
    tokens.add_argument(
        "--tokenizer-type", default="HuggingFaceTokenizer", choices=["HuggingFaceTokenizer"], help="the only kind"
    )
    flags.add_tokens(tokens)
    tokens.add_argument("--dtype", choices=["auto", "uint16", "int32"], default="auto", help="auto: as Megatron does")
    flags.add_records(parser.add_argument_group("bad records"))
    flags.add_decontamination(parser.add_argument_group("evaluation sets"))
    running = parser.add_argument_group("running")
    running.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="continue unfinished work of the same request",
    )
    running.add_argument("--log-interval", type=int, default=1000, help="documents between progress lines, at least")
    flags.add_running(running, printed="manifests")
    for option in ("--split-sentences", "--partitions"):
        parser.add_argument(option, nargs="?", const="1", help=argparse.SUPPRESS)
    # Megatron's flag for what is always so here.
    parser.add_argument("--keep-sequential-samples", action="store_true", help=argparse.SUPPRESS)
    add_job_flags(parser, has_array=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Preprocess as asked."""
    from pretrainkit.errors import RequestError

    if arguments.split_sentences is not None:
        raise RequestError("not offered", where="--split-sentences", action="leave it out: a document is one sequence")
    if arguments.partitions not in (None, "1"):
        raise RequestError("not needed", where="--partitions", action="leave it out: all workers share any input")
    from pretrainkit.data.indexed.build import preprocess
    from pretrainkit.data.indexed.request import Request
    from pretrainkit.data.job_array import parse_shard
    from pretrainkit.data.report import Report

    fields = request_fields(Request, arguments) | {"inputs": tuple(arguments.input)}
    fields["shard"] = parse_shard(arguments.shard, os.environ) if arguments.shard else None
    manifests = preprocess(Request(**fields))
    report = Report([asdict(manifest) for manifest in manifests], [manifest.summary for manifest in manifests])
    return report.print(as_json=arguments.json)


def main(argv: list[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    return run_command(or_submit(run, __file__, argv), build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
