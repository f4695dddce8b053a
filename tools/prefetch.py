#!/usr/bin/env python
"""Models and tokenizers from the hub to a folder on a group disk, each verified (with containers: scripts/prefetch.sh).

    python tools/prefetch.py --dir /group/me/offline --model meta-llama/Llama-3.1-8B

A model lies in DIR/models/OWNER/NAME, a tokenizer with its config in DIR/tokenizers/OWNER/NAME. An interrupted download
resumes; what exists is verified. Gated models need HF_TOKEN, or `hf auth login`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrainkit.cli import Parser, run_command
from pretrainkit.errors import EXIT_DONE


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(
        prog="prefetch.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog="Exit codes: 0 everything exists and is verified; 1 failed; 2 wrong request, or too little disk space.",
    )
    parser.add_argument("--dir", type=Path, required=True, help="folder on a group disk")
    parser.add_argument("--model", action="append", default=[], metavar="ID", help="OWNER/NAME[@REVISION]")
    parser.add_argument("--tokenizer", action="append", default=[], metavar="ID", help="OWNER/NAME[@REVISION]")
    parser.add_argument("--size", action="store_true", help="print how many bytes would be downloaded, and stop")
    return parser


def command(arguments: argparse.Namespace) -> int:
    """Fetch everything; print the folders."""
    from pretrainkit.data.hub import KINDS, fetch, list_files, parse_repository

    wanted = [parse_repository(kind, text) for kind in KINDS for text in getattr(arguments, kind)]
    base = arguments.dir.expanduser().absolute()
    if arguments.size:
        missing = [repository for repository in wanted if not repository.folder(base).exists()]
        print(sum(file.size for repository in missing for file in list_files(repository)[1]))
        return EXIT_DONE
    for repository in wanted:
        print(fetch(repository, base))
    return EXIT_DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(command, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
