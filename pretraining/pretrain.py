"""Starts the pretraining of a model, or continues it: flags and YAML -> run.json -> executor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrainkit.cli import Parser, run_command, translate_write_errors
from pretrainkit.config.parser import add_run_flags, given_flags
from pretrainkit.jobs.secrets import hide_token_from_process_list

TRAIN_SCRIPT = Path(__file__).resolve().with_name("train.py")


def build_parser() -> Parser:
    """The parser of this command."""
    parser = Parser(
        prog="pretrain.py",
        usage="%(prog)s --hf_model_id MODEL --dataset_path DATA [options]",
        description=__doc__,
        epilog="Exit codes: 0 done; 1 failed; 2 wrong request, nothing was started; 85 stopped by a signal or "
        "the time limit: the same command continues the run.",
    )
    add_run_flags(parser)
    return parser


def command(arguments: argparse.Namespace) -> int:
    """Start the run that the arguments ask for."""
    from pretrainkit.config.load import load_config
    from pretrainkit.launch.listing import print_experiments
    from pretrainkit.launch.start import dry_run, print_plan, start

    config = load_config(arguments.config_files, given_flags(arguments), arguments.assignments)
    if arguments.list:
        return print_experiments(Path(config.experiments_dir).expanduser(), as_json=arguments.json)
    if arguments.plan:
        return print_plan(config, as_json=arguments.json)
    with translate_write_errors(Path(config.experiments_dir) / config.experiment):
        if arguments.dry_run:
            return dry_run(config, train_script=TRAIN_SCRIPT)
        return start(config, train_script=TRAIN_SCRIPT, command_line=sys.argv, follow=arguments.follow)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and give its exit code."""
    if argv is None:
        hide_token_from_process_list()
    return run_command(command, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
