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
from pretrainkit.data.flags import DataFlags, request_fields
from pretrainkit.jobs.tool_job import add_job_flags, or_submit


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    flags = DataFlags(unit="sample")
    which = parser.add_argument_group("which shard")
    which.add_argument("--shard_id", help="this shard; else the scheduler's array variable (Grid Engine: task 1 is 0)")
    which.add_argument("--shard_offset", type=int, default=0, help="added to the array's id, for very large sets")
    which.add_argument("--all", action="store_true", help="all shards that are not complete")
    which.add_argument("--status", action="store_true", help="list missing shards and make none; exit 1 if any")
    which.add_argument("--num_shards", type=int, help="spread the input over so many shards of about equal size")
    which.add_argument("--verify", action="store_true", help="find damage in finished shards by reading them, too")
    what = parser.add_argument_group("input and output")
    flags.add_input(what, "input_dir", "folders, files or globs, in natural order")
    what.add_argument("--output_dir", type=Path, required=True)
    what.add_argument("--json_key", default="text", help="key or column of JSON Lines, Parquet and Arrow input")
    what.add_argument("--ids_format", choices=["json", "npy", "msgpack"], default="json", help="token_ids.<this>")
    what.add_argument("--text", action=argparse.BooleanOptionalAction, default=True, help="keep the text: text.txt")
    what.add_argument("--stripe", type=int, metavar="COUNT", help="Lustre stripe count of the output folder")
    flags.add_overwrite(what, "replace shards whose input has changed")
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument("--model_id", required=True, help="tokenizer: Hugging Face folder, tokenizer.json or hub id")
    flags.add_tokens(
        tokens,
        spellings=("plain", "encode"),
        verification=("sample", "off"),
        has_bos=False,
        special_tokens="template",
    )
    running = parser.add_argument_group("running")
    flags.add_records(running)
    flags.add_decontamination(parser.add_argument_group("evaluation sets"))
    flags.add_running(running, printed="records")
    add_job_flags(parser, has_array=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Make or list shards as asked."""
    from pretrainkit.data.job_array import parse_shard_id
    from pretrainkit.data.report import Report
    from pretrainkit.data.shards import request
    from pretrainkit.data.shards.build import make_shards

    shard_id = None
    if not (arguments.all or arguments.status):
        shard_id = parse_shard_id(arguments.shard_id, arguments.shard_offset, os.environ)
    fields = request_fields(request.ShardRequest, arguments)
    fields |= {"inputs": tuple(arguments.input_dir), "has_text": arguments.text}
    plan = request.make_shard_plan(request.ShardRequest(**fields))
    if arguments.status:
        return request.report_status(plan).print(as_json=arguments.json)
    if shard_id is not None:
        request.check_shard_id(shard_id, plan)
    shard_ids = list(range(plan.num_shards)) if shard_id is None else [shard_id]
    records = make_shards(plan, shard_ids, stripe_count=arguments.stripe)
    report = Report([record.to_json() for record in records], [record.summary for record in records])
    return report.print(as_json=arguments.json)


def main(argv: list[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    return run_command(or_submit(run, __file__, argv), build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
