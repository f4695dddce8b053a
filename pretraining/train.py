#!/usr/bin/env python
"""One rank of a training run: started by torchrun or srun with RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE.

It reads everything it needs from run.json, which pretrain.py writes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pretrainkit.cli import Parser, run_command
from pretrainkit.engine.rank import run_rank


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(prog="train.py", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run.json of the experiment")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(lambda arguments: run_rank(arguments.run), build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
