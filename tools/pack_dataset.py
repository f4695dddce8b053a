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


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(description=__doc__.split("\n\n")[0])
    what = parser.add_argument_group("input and output")
    what.add_argument(
        "--input", nargs="+", required=True, help="saved dataset, .parquet, .jsonl and other files or folders; hub:NAME"
    )
    what.add_argument("--output_dir", type=Path, required=True, help="for datasets.load_from_disk, and --dataset_path")
    what.add_argument("--text_column", default="text", help="column or key of the text")
    what.add_argument("--text_documents", choices=["line", "file"], default="line", help="a document of .txt input")
    what.add_argument("--hub_split", default="train", help="split of a hub dataset")
    what.add_argument("--hub_revision", help="revision of a hub dataset")
    what.add_argument("--overwrite", action="store_true", help="replace a set made otherwise, once the new is complete")
    tokens = parser.add_argument_group("tokens and sequences")
    tokens.add_argument("--tokenizer_model", required=True, help="Hugging Face folder, tokenizer.json or hub id")
    tokens.add_argument("--sequence_length", type=int, required=True, help="tokens in a sequence")
    tokens.add_argument(
        "--packing",
        choices=["concat", "bestfit"],
        default="concat",
        help="concat: cut the stream of documents; bestfit: keep documents whole where they fit, pad the rest",
    )
    tokens.add_argument(
        "--append_eod", action=argparse.BooleanOptionalAction, default=True, help="end every document with EOD"
    )
    tokens.add_argument("--eod_token", help="the token that ends a document, instead of the tokenizer's EOS")
    tokens.add_argument("--add_bos", action="store_true", help="begin every document with the BOS token")
    tokens.add_argument(
        "--special_tokens_in_text", choices=["plain", "encode", "error"], default="plain", help="spelled in a text"
    )
    tokens.add_argument(
        "--verify_tokens", choices=["sample", "all", "off"], default="sample", help="compare with tokenizers"
    )
    tokens.add_argument("--engine", choices=["auto", "tokenizers"], default="auto", help="auto: fastokens if equal")
    running = parser.add_argument_group("running")
    running.add_argument("--num_proc", type=int, help="processes; else DATASET_NUM_PROC, else by cores and memory")
    running.add_argument("--batch_size", type=int, help="sequences in memory; else DATASET_BATCH_SIZE, else by machine")
    running.add_argument(
        "--writer_batch_size", type=int, help="sequences in a record batch; else DATASET_WRITER_BATCH_SIZE"
    )
    running.add_argument("--on_error", choices=["stop", "skip", "replace"], default="stop", help="for bad records")
    running.add_argument("--max_doc_bytes", type=int, default=0, help="longer texts are bad records; 0: no limit")
    running.add_argument("--wait_hours", type=float, default=24.0, help="how long to wait for another preparer")
    running.add_argument("--json", action="store_true", help="print the manifest as JSON")
    running.add_argument("--quiet", action="store_true", help="only warnings and the result")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Pack, or wait until it is done."""
    from pretrainkit.data.packed.build import pack_dataset, print_packed
    from pretrainkit.data.packed.request import PackRequest, machine_settings, make_pack_plan

    request = PackRequest(
        inputs=tuple(arguments.input),
        output_dir=arguments.output_dir.resolve(),
        tokenizer_model=arguments.tokenizer_model,
        sequence_length=arguments.sequence_length,
        packing=arguments.packing,
        text_column=arguments.text_column,
        append_eod=arguments.append_eod,
        eod_token=arguments.eod_token,
        add_bos=arguments.add_bos,
        special_tokens_in_text=arguments.special_tokens_in_text,
        text_documents=arguments.text_documents,
        on_error=arguments.on_error,
        max_document_bytes=arguments.max_doc_bytes,
        verify_tokens=arguments.verify_tokens,
        engine=arguments.engine,
        hub_split=arguments.hub_split,
        hub_revision=arguments.hub_revision,
        overwrite=arguments.overwrite,
    )
    machine = machine_settings(
        os.environ,
        num_proc=arguments.num_proc,
        batch_size=arguments.batch_size,
        writer_batch_size=arguments.writer_batch_size,
    )
    manifest, prepared = pack_dataset(make_pack_plan(request, machine), timeout_s=3600 * arguments.wait_hours)
    print_packed(request.output_dir, manifest, prepared=prepared, as_json=arguments.json)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    return run_command(run, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
