#!/usr/bin/env python
"""Publishes a released Hugging Face folder that passed the gate as a repository on the hub, private unless asked.

It needs the gate's report of exactly these files, or runs the gate (--source), writes the model card from the records
of the training, uploads, and makes one commit. An interrupted upload is continued by the same command.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pretrainkit.cli import Parser, run_command
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="Hugging Face folder to be published")
    parser.add_argument("repository", metavar="REPO", help="OWNER/NAME on the hub; it is made if it doesn't exist")
    parser.add_argument("--revision", default="main", help="branch, made if it doesn't exist, such as step-1000")
    parser.add_argument(
        "--source",
        type=Path,
        nargs="+",
        default=[],
        help="run the gate with this checkpoint, or an average's parents; otherwise its report, FOLDER.verified.json",
    )
    parser.add_argument("--hf-model", type=Path, help="as verify_release.py has it")
    parser.add_argument("--base", type=Path, help="as verify_release.py has it")
    parser.add_argument("--public", action="store_true", help="everyone may read the repository")
    parser.add_argument("--license", help="licence of the release; default: that of the base model's card")
    parser.add_argument("--base-model", metavar="ID", help="the base model on the hub, where the records don't name it")
    parser.add_argument("--overwrite", action="store_true", help="replace other content of the branch, by a new commit")
    parser.add_argument("--dry_run", action="store_true", help="show the files and the card; nothing is sent")
    parser.add_argument("--verbose", action="store_true", help="log more")
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Check, write the card, publish."""
    from pretrainkit.release import publication

    request = publication.Request(
        folder=arguments.folder,
        repository=arguments.repository,
        revision=arguments.revision,
        source=tuple(arguments.source),
        hf_folder=arguments.hf_model,
        base=arguments.base,
        private=not arguments.public,
        licence=arguments.license,
        base_model=arguments.base_model,
        overwrite=arguments.overwrite,
    )
    report = publication.report_of(request)
    if not report.passed:
        print(report.as_markdown(hashes=False))
        return EXIT_FAILED
    if arguments.dry_run:
        print(publication.describe(request, report))
        return EXIT_DONE
    print(publication.publish_release(request, report))
    return EXIT_DONE


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return run_command(run, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
