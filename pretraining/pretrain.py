"""Starts the pretraining of a model, or continues it: flags and YAML -> run.json -> executor."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrainkit.cli import Parser, run_command, translate_write_errors
from pretrainkit.config.parser import add_run_flags, given_flags
from pretrainkit.config.schema import RunConfig
from pretrainkit.errors import EXIT_DONE
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
    from pretrainkit.engine.stop_requests import count_time_from_here
    from pretrainkit.launch.start import dry_run, start
    from pretrainkit.run.resource_plan import settle

    config = load_config(arguments.config_files, given_flags(arguments), arguments.assignments)
    if arguments.plan:
        return show_plan(config, as_json=arguments.json)
    with translate_write_errors(Path(config.experiments_dir) / config.experiment):
        if arguments.dry_run:
            return dry_run(config, train_script=TRAIN_SCRIPT, check=settle)
        if not config.launch.is_scheduled:
            count_time_from_here()
        return start(config, train_script=TRAIN_SCRIPT, command_line=sys.argv, check=settle, follow=arguments.follow)


def show_plan(config: RunConfig, *, as_json: bool) -> int:
    """Print what a start would do and take. Its exit code is 0 only when a start would go on to train."""
    from pretrainkit.launch.start import resolve_request
    from pretrainkit.launch.summary import summarize_estimates
    from pretrainkit.run.folder import changes_since_last_start
    from pretrainkit.run.resource_plan import settle, with_estimates
    from pretrainkit.run.resume_plan import plan_start

    run, plan = with_estimates(run := resolve_request(config), refuse=False), plan_start(run)
    changes = changes_since_last_start(run)
    if as_json:
        estimates = dataclasses.asdict(run.estimates) if run.estimates else None
        print(json.dumps({**plan.to_json(), "changes": changes, "estimates": estimates}, indent=2))
    else:
        print(plan.describe())
        print("\n".join(f"changed    {name}: {old} -> {new}" for name, (old, new) in changes.items()) or "changed    -")
        print(summarize_estimates(run))
    settle(run)
    return EXIT_DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and give its exit code."""
    if argv is None:
        hide_token_from_process_list()
    return run_command(command, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
