#!/usr/bin/env python
"""Release gate: may the Hugging Face folder RELEASED be given away as the model in SOURCE?

Re-reads every file from disk, compares every bit with SOURCE, runs both models, and writes a report with the hash
of every file. Exit code 0 only when there is no doubt.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pretrainkit.cli import Parser, run_command, value_of
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "source",
        type=Path,
        nargs="+",
        help="checkpoint that the release was made from, of any known kind; of an average its parents, or their run",
    )
    parser.add_argument("released", type=Path, help="Hugging Face folder to be released")
    parser.add_argument("--hf-model", type=Path, help="original Hugging Face folder, if SOURCE doesn't carry its files")
    parser.add_argument(
        "--base", type=Path, help="model before training, whose held-out loss is reported for comparison"
    )
    parser.add_argument("--text", type=Path, help="held-out text; default: Python's language reference")
    parser.add_argument(
        "--long-tokens",
        type=int,
        help="tokens of the long prompt and of each sequence; default: 512, with a prompt past every window and rotary "
        "boundary of config.json up to 16384",
    )
    parser.add_argument("--num-sequences", type=int, default=4, help="held-out sequences")
    parser.add_argument(
        "--tasks", nargs="+", default=[], metavar="TASK", help="also compare the scores of both models (evaluate.py)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="first documents of each of --tasks")
    parser.add_argument(
        "--also",
        type=_readers,
        default=(),
        metavar="vllm,llama.cpp",
        help="programs that must continue prompts with the same tokens as transformers, where they are installed",
    )
    parser.add_argument("--files-only", action="store_true", help="don't run the models; the report says so")
    parser.add_argument("--report", type=Path, help="writes REPORT.json and REPORT.md; default: RELEASED.verified")
    parser.add_argument("--ignore-config-fields", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--verbose", action="store_true", help="log more")
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    return parser


def _readers(text: str) -> tuple[str, ...]:
    from pretrainkit.release.other_readers import parse_readers

    return value_of(parse_readers)(text)


def run(arguments: argparse.Namespace) -> int:
    """Check, report, and say whether the release passed."""
    from pretrainkit.evaluation.tasks import TaskRequest
    from pretrainkit.release.gate import check_release
    from pretrainkit.release.models import RunOptions
    from pretrainkit.release.report import report_prefix

    options = RunOptions(
        arguments.long_tokens,
        arguments.num_sequences,
        arguments.text,
        arguments.base,
        tuple(arguments.ignore_config_fields),
    )
    report = check_release(
        arguments.source,
        arguments.released,
        hf_folder=arguments.hf_model,
        options=options,
        files_only=arguments.files_only,
        tasks=TaskRequest(tuple(arguments.tasks), limit=arguments.limit) if arguments.tasks else None,
        readers=arguments.also,
    )
    report.write(arguments.report or report_prefix(arguments.released))
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report.as_markdown(hashes=False))
    return EXIT_DONE if report.passed else EXIT_FAILED


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return run_command(run, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
