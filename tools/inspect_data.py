#!/usr/bin/env python
"""Look at prepared data: show, stats, verify, merge, count, blend."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pretrainkit.cli import Parser, run_command


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    def add(name: str, what: str) -> Parser:
        command = commands.add_parser(name, help=what, description=what)
        command.add_argument("--json", action="store_true", help="print JSON")
        return command

    show = add("show", "decode documents, special tokens visible")
    show.add_argument("prefix", help="PREFIX of PREFIX.bin and PREFIX.idx")
    show.add_argument("--documents", default="0:3", help="N, or N:M without M; counted from 0")
    show.add_argument("--tokenizer-model", help="instead of the manifest's")
    show.add_argument("--ids", action="store_true", help="print the ids too")
    stats = add("stats", "lengths of documents, tokens by input file")
    stats.add_argument("data", nargs="+", help="prefixes or folders")
    stats.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the tokens by length of document")
    verify = add("verify", "structure, pointers, ids in range, checksums, EOD, manifest")
    verify.add_argument("data", nargs="+", help="prefixes, folders, token shards or packed datasets")
    verify.add_argument("--tokenizer-model", help="bounds the ids of data without a manifest")
    merge = add("merge", "join pairs in the order given into one")
    merge.add_argument("--input", nargs="+", required=True, help="prefixes, folders or globs")
    merge.add_argument("--output-prefix", required=True, help="writes OUTPUT_PREFIX.bin and .idx")
    merge.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    count = add("count", "documents, tokens, samples and steps of one epoch")
    count.add_argument("data", nargs="+", help="prefixes or folders")
    count.add_argument("--sequence-length", type=int, default=8192, help="tokens of a sample")
    count.add_argument("-g", "--global-batch-size", type=int, default=2048, help="samples of a step")
    count.add_argument("--split", default="100,0,0", help="shares of training, validation, test")
    blend = add("blend", "write a mixture's names, weights and token counts")
    blend.add_argument("data", nargs="+", help="PREFIX, NAME=PREFIX or NAME=PREFIX:WEIGHT")
    blend.add_argument("--output", type=Path, required=True, help="the blend file to write")
    blend.add_argument("--temperature", type=float, default=1.0, help="without weights: above 1 lifts small datasets")
    blend.add_argument("--total-tokens", type=float, help="tokens of the run, to tell the epochs of each part")
    blend.add_argument("--overwrite", action="store_true", help="replace an existing file")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run one of the commands, print its result, and give the exit code."""
    from pretrainkit.data.indexed import inspect

    if arguments.command == "show":
        return inspect.show_documents(
            Path(arguments.prefix),
            arguments.documents,
            arguments.tokenizer_model,
            with_ids=arguments.ids,
            as_json=arguments.json,
        )
    if arguments.command == "stats":
        report = inspect.report_statistics(arguments.data, arguments.plot)
    elif arguments.command == "verify":
        from pretrainkit.data.verify import report_verification

        report = report_verification(arguments.data, arguments.tokenizer_model)
    elif arguments.command == "merge":
        report = inspect.report_merge(arguments.input, arguments.output_prefix, overwrite=arguments.overwrite)
    elif arguments.command == "count":
        report = inspect.report_epoch(
            arguments.data, arguments.split, arguments.sequence_length, arguments.global_batch_size
        )
    else:
        report = inspect.report_blend(
            arguments.data,
            arguments.output,
            temperature=arguments.temperature,
            total_tokens=arguments.total_tokens,
            overwrite=arguments.overwrite,
        )
    return report.print(as_json=arguments.json)


def main(argv: list[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    return run_command(run, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
