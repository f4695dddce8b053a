#!/usr/bin/env python
"""Show how an experiment went, over all its attempts: steps, losses, speed, restarts, checkpoints, logs.

Of several experiments it also writes a page that compares them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrainkit.cli import Parser, run_command
from pretrainkit.errors import EXIT_DONE, CheckpointError, PretrainkitError, RequestError
from pretrainkit.logs import get_logger

log = get_logger("inspect_run")


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(prog="inspect_run.py", description=__doc__)
    parser.add_argument("experiment", type=Path, nargs="+", help="folder of the experiment; of several: compare them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="where to draw it (default: EXPERIMENT/run.png)")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE.html",
        help="where to write the page that compares experiments (default: comparison.html next to the first one)",
    )
    parser.add_argument("--no-plot", action="store_true", help="draw nothing")
    parser.add_argument("--verify", action="store_true", help="read all checkpoints and check their checksums")
    return parser


def command(arguments: argparse.Namespace) -> int:
    """Print the summary and draw the picture."""
    from pretrainkit.run.history import read_history

    experiments: list[Path] = arguments.experiment
    if len(experiments) > 1 or arguments.html:
        return _compare(experiments, arguments)
    arguments.experiment = experiments[0]
    history = read_history(arguments.experiment, verify=arguments.verify)
    _ask_scheduler(history.summary["jobs"], arguments.experiment)
    picture, problem = None if arguments.no_plot else arguments.plot or arguments.experiment / "run.png", None
    if picture:
        from pretrainkit.run.plot import plot_history

        try:
            plot_history(history, picture)
        except OSError as error:  # the summary of another user's experiment can be had all the same
            problem = PretrainkitError(
                f"the picture can't be written: {error.strerror}",
                action="--plot takes another file",
                where=str(picture),
            )
            picture = None
    if arguments.json:
        print(json.dumps({**history.summary, "plot": str(picture) if picture else None}, indent=2))
    else:
        print(history.describe() + (f"\nplot       {picture}" if picture else ""))
    if damaged := history.summary.get("damaged_checkpoints"):
        raise CheckpointError(
            f"{len(damaged)} checkpoints don't have the bytes they were saved with: {', '.join(damaged)}",
            action="a start passes over them; restore them from a backup, or remove them",
            where=str(arguments.experiment),
        )
    if problem and arguments.plot:
        raise problem
    if problem:
        log.warning("%s", problem)
    return EXIT_DONE


def _compare(experiments: list[Path], arguments: argparse.Namespace) -> int:
    """Print the summaries and write the page."""
    from pretrainkit.run.comparison import names_of, write_comparison
    from pretrainkit.run.history import read_history

    if unused := [flag for flag in ("plot", "verify") if getattr(arguments, flag)]:
        raise RequestError(f"--{unused[0]} with a comparison", needed="one experiment, without --html")
    names = names_of(experiments)
    histories = {name: read_history(path) for name, path in zip(names, experiments, strict=True)}
    for history, path in zip(histories.values(), experiments, strict=True):
        _ask_scheduler(history.summary["jobs"], path)
    page = None if arguments.no_plot else arguments.html or experiments[0].resolve().parent / "comparison.html"
    if page:
        write_comparison(histories, page)
    if arguments.json:
        found = {name: history.summary for name, history in histories.items()}
        print(json.dumps({"experiments": found, "html": str(page) if page else None}, indent=2))
    else:
        print("\n\n".join(history.describe() for history in histories.values()))
        print(f"\npage       {page}" if page else "", end="\n" if page else "")
    return EXIT_DONE


def _ask_scheduler(jobs: list[dict[str, Any]], experiment: Path) -> None:
    """Correct the state of the last job, if its scheduler answers.

    It doesn't know a job any more that was killed, and it knows one that it will start again.
    """
    from pretrainkit.errors import EXIT_STOPPED_AFTER_SAVING
    from pretrainkit.jobs.scheduler import run_here
    from pretrainkit.jobs.submit import read_records
    from pretrainkit.run.folder import RunFolder

    if not jobs or jobs[-1]["exit_code"] not in (None, EXIT_STOPPED_AFTER_SAVING):
        return
    last = read_records(RunFolder(experiment).jobs)[-1]
    with contextlib.suppress(PretrainkitError):
        is_alive, has_ended = (last.successor or last).is_alive(run_here), jobs[-1]["exit_code"] is not None
        if is_alive and has_ended:
            jobs[-1]["state"] = "queued again after exit code 85"
        elif not is_alive and not has_ended:
            jobs[-1]["state"] = "ended without an exit code: killed, cancelled or lost"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and give its exit code."""
    return run_command(command, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
