#!/usr/bin/env python
"""JSON lines to Megatron's .bin/.idx pairs, with a manifest beside each."""

from __future__ import annotations

import argparse
import sys

from pretrainkit.cli import Parser, run_command


def build_parser() -> Parser:
    """The command's flags; those that Megatron's tool has keep their names."""
    parser = Parser(description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, help="JSON Lines files")
    parser.add_argument("--output-prefix", required=True, help="writes OUTPUT_PREFIX_KEY_document.{bin,idx}")
    parser.add_argument("--tokenizer-model", required=True, help="Hugging Face folder, tokenizer.json or hub id")
    parser.add_argument("--json-keys", nargs="+", default=["text"], help="keys whose text is encoded, a pair each")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the EOD token")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Preprocess as asked."""
    from pretrainkit.data.preprocess import Request, preprocess

    request = Request(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        tokenizer_model=arguments.tokenizer_model,
        json_keys=tuple(arguments.json_keys),
        append_eod=arguments.append_eod,
        workers=arguments.workers,
    )
    for manifest in preprocess(request):
        print(f"{manifest.num_documents} documents, {manifest.num_tokens} tokens")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Entry point; gives the exit code."""
    return run_command(run, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
