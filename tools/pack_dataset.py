#!/usr/bin/env python
"""A dataset prepared once for training: texts tokenised, concatenated, cut to one length, and saved as Arrow.

May be started by all ranks of a distributed run at once: one prepares, the others wait and write nothing.
DATASET_NUM_PROC, DATASET_BATCH_SIZE and DATASET_WRITER_BATCH_SIZE are taken from the environment.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pretrainkit.cli import Parser, run_command
from pretrainkit.data.flags import DataFlags, request_fields


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    flags = DataFlags(unit="document")
    what = parser.add_argument_group("input and output")
    flags.add_input(what, "input", "saved dataset, .parquet, .jsonl and other files or folders; hub:NAME")
    what.add_argument("--output_dir", type=Path, required=True, help="for datasets.load_from_disk, and --dataset_path")
    what.add_argument("--text_column", default="text", help="column or key of the text")
    what.add_argument("--hub_split", default="train", help="split of a hub dataset")
    what.add_argument("--hub_revision", help="revision of a hub dataset")
    flags.add_overwrite(what, "replace a set made with other settings, once the new one is complete")
    what.add_argument("--verify", action="store_true", help="find damage in a finished set by reading it, too")
    tokens = parser.add_argument_group("tokens and sequences")
    tokens.add_argument("--tokenizer_model", required=True, help="Hugging Face folder, tokenizer.json or hub id")
    tokens.add_argument("--sequence_length", type=int, required=True, help="tokens in a sequence")
    tokens.add_argument(
        "--packing",
        choices=["concat", "bestfit"],
        default="concat",
        help="concat: cut the stream of documents; bestfit: don't cut documents that fit, pad the rest",
    )
    flags.add_tokens(tokens, appends_eod=True)
    running = parser.add_argument_group("running")
    running.add_argument("--num_proc", type=int, help="processes; else DATASET_NUM_PROC, else by cores and memory")
    running.add_argument("--batch_size", type=int, help="sequences in memory; else DATASET_BATCH_SIZE, else by machine")
    running.add_argument(
        "--writer_batch_size", type=int, help="sequences in a record batch; else DATASET_WRITER_BATCH_SIZE"
    )
    flags.add_records(running)
    flags.add_decontamination(parser.add_argument_group("evaluation sets"))
    running.add_argument("--wait_hours", type=float, default=24.0, help="how long to wait for another process's build")
    flags.add_running(running, has_workers=False, printed="manifest")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Pack, or wait until it is done."""
    from pretrainkit.data.packed.build import pack_dataset
    from pretrainkit.data.packed.request import PackRequest, machine_settings, make_pack_plan
    from pretrainkit.data.report import Report

    fields = request_fields(PackRequest, arguments)
    fields |= {"inputs": tuple(arguments.input), "output_dir": arguments.output_dir.resolve()}
    request = PackRequest(**fields)
    machine = machine_settings(
        os.environ,
        num_proc=arguments.num_proc,
        batch_size=arguments.batch_size,
        writer_batch_size=arguments.writer_batch_size,
    )
    manifest, prepared = pack_dataset(make_pack_plan(request, machine), timeout_s=3600 * arguments.wait_hours)
    origin = f"prepared in {manifest.elapsed_s:.1f} s" if prepared else "was ready"
    report = Report(manifest.to_json(), [f"{request.output_dir}: {manifest.summary}; {origin}"])
    return report.print(as_json=arguments.json)


def main(argv: list[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    return run_command(run, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
