#!/usr/bin/env python
"""Text to WebDataset token shards, one a job-array task: shard-00003.tar with token_ids.json and text.txt.

Without --num_shards the n-th input file becomes the n-th shard. A shard appears whole or not at all, with its table of
samples and, last of all, its record shard-00003.json. A rerun makes what is missing and touches nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pretrainkit.cli import Parser, run_command
from pretrainkit.jobs.tool_job import add_job_flags, or_submit


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(description=__doc__.split("\n\n")[0])
    which = parser.add_argument_group("which shard")
    which.add_argument("--shard_id", help="this shard; else the scheduler's array variable (Grid Engine: task 1 is 0)")
    which.add_argument("--shard_offset", type=int, default=0, help="added to the array's id, for very large sets")
    which.add_argument("--all", action="store_true", help="all shards that are not complete")
    which.add_argument("--status", action="store_true", help="list missing shards and make none; exit 1 if any")
    which.add_argument("--num_shards", type=int, help="spread the input over so many shards of about equal size")
    what = parser.add_argument_group("input and output")
    what.add_argument("--input_dir", nargs="+", required=True, help="folders, files or globs, in natural order")
    what.add_argument("--output_dir", type=Path, required=True)
    what.add_argument("--json_key", default="text", help="key or column of JSON Lines, Parquet and Arrow input")
    what.add_argument("--text_documents", choices=["line", "file"], default="line", help="a sample of .txt input")
    what.add_argument("--ids_format", choices=["json", "npy", "msgpack"], default="json", help="token_ids.<this>")
    what.add_argument("--text", action=argparse.BooleanOptionalAction, default=True, help="keep the text: text.txt")
    what.add_argument("--stripe", type=int, metavar="COUNT", help="Lustre stripe count of the output folder")
    what.add_argument("--overwrite", action="store_true", help="replace shards whose input has changed")
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument("--model_id", required=True, help="tokenizer: Hugging Face folder, tokenizer.json or hub id")
    tokens.add_argument(
        "--special_tokens", choices=["template", "none"], default="template", help="what the tokenizer's template adds"
    )
    tokens.add_argument("--append_eod", action="store_true", help="end every sample with the EOS token, once")
    tokens.add_argument("--eod_token", help="the token that ends a sample, instead of the tokenizer's EOS")
    tokens.add_argument(
        "--special_tokens_in_text", choices=["plain", "encode"], default="plain", help="a token's spelling in a text"
    )
    tokens.add_argument(
        "--verify_tokens", choices=["sample", "off"], default="sample", help="compare with Hugging Face tokenizers"
    )
    tokens.add_argument("--engine", choices=["auto", "tokenizers"], default="auto", help="auto: fastokens if equal")
    running = parser.add_argument_group("running")
    running.add_argument("--on_error", choices=["stop", "skip", "replace"], default="stop", help="for bad records")
    running.add_argument("--max_doc_bytes", type=int, default=0, help="longer texts are bad records; 0: no limit")
    running.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    running.add_argument("--json", action="store_true", help="print the records as JSON")
    running.add_argument("--quiet", action="store_true", help="only warnings and the result")
    add_job_flags(parser, has_array=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Make or list shards as asked."""
    from pretrainkit.data.job_array import parse_shard_id
    from pretrainkit.data.shards import request
    from pretrainkit.data.shards.build import make_shards, print_records, print_status

    shard_id = None
    if not (arguments.all or arguments.status):
        shard_id = parse_shard_id(arguments.shard_id, arguments.shard_offset, os.environ)
    plan = request.make_shard_plan(
        request.ShardRequest(
            inputs=tuple(arguments.input_dir),
            output_dir=arguments.output_dir,
            model_id=arguments.model_id,
            num_shards=arguments.num_shards,
            json_key=arguments.json_key,
            ids_format=arguments.ids_format,
            has_text=arguments.text,
            special_tokens=arguments.special_tokens,
            append_eod=arguments.append_eod,
            eod_token=arguments.eod_token,
            special_tokens_in_text=arguments.special_tokens_in_text,
            text_documents=arguments.text_documents,
            on_error=arguments.on_error,
            max_document_bytes=arguments.max_doc_bytes,
            verify_tokens=arguments.verify_tokens,
            engine=arguments.engine,
            workers=arguments.workers,
            overwrite=arguments.overwrite,
        )
    )
    if arguments.status:
        return print_status(plan, as_json=arguments.json)
    if shard_id is not None:
        request.check_shard_id(shard_id, plan)
    shard_ids = list(range(plan.num_shards)) if shard_id is None else [shard_id]
    records = make_shards(plan, shard_ids, stripe_count=arguments.stripe)
    print_records(records, as_json=arguments.json)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    return run_command(or_submit(run, __file__, argv, has_array=True), build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
