#!/usr/bin/env python
"""Say why a training run is slow: measure it, change one thing at a time, rank what costs time.

The program is started with instrumentation in it and ended when all is measured. It sees all files, but what it writes,
changes and deletes goes to a scratch folder, which is removed: every file stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrainkit.cli import Parser, run_command
from pretrainkit.diagnosis.spec import PROBES, Spec
from pretrainkit.errors import EXIT_DONE, RequestError

REPOSITORY = Path(__file__).resolve().parents[1]


def probes(flag: str, text: str) -> tuple[str, ...]:
    """Names of probes, divided by commas. Raises RequestError for one that there isn't."""
    names = tuple(filter(None, text.split(",")))
    unknown = [name for name in names if name not in PROBES]
    if unknown:
        raise RequestError(f"no probe is called {', '.join(unknown)}", needed=f"one of {', '.join(PROBES)}", where=flag)
    return names


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(
        prog="diagnose_speed.py",
        usage="%(prog)s (EXPERIMENT | --script 'COMMAND' | --module PKG:FUNCTION) [options]",
        description=__doc__,
        epilog="Exit codes: 0 there is a report, whatever it says; 1 the program failed; 2 wrong request.",
    )
    add = parser.add_argument
    add("experiment", type=Path, nargs="?", help="folder of a run of pretraining/pretrain.py")
    add("--script", metavar="'COMMAND'", help="a command that trains: 'python train.py ...', 'torchrun ... train.py'")
    add("--module", metavar="PKG:FUNCTION", help="a function that gives an object with model, loader and optimizer")
    add("--output", type=Path, metavar="DIR", help="where report.json and report.html go (default: diagnosis/NAME)")
    add("--against", type=Path, metavar="EXPERIMENT", help="another run: is it the amount of data, or the speed?")
    add("--budget_s", type=float, default=60.0, help="time for measuring, from the first step on, s")
    add("--longest_s", type=float, default=1800.0, help="longest time of one start of the program, s")
    add("--probes", default="", metavar="A,B", help=f"only these of the probes {', '.join(PROBES)}")
    add("--without", default="", metavar="A,B", help="not these probes")
    add("--in_place", action="store_true", help="let the program write, change and delete files as it always does")
    add("--keep", action="store_true", help="keep the scratch folder with all outputs of the program")
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def command(arguments: argparse.Namespace) -> int:
    """Measure, write the report and print it."""
    from pretrainkit.diagnosis import diagnose, program, report

    given = [arguments.experiment, arguments.script, arguments.module]
    if sum(source is not None for source in given) != 1:
        raise RequestError("not one program to diagnose", needed="one of EXPERIMENT, --script and --module")
    if arguments.against and not arguments.experiment:
        raise RequestError("only experiments can be compared", where="--against")
    if arguments.script:
        source = program.of_script(arguments.script)
    elif arguments.module:
        source = program.of_module(arguments.module)
    else:
        source = program.of_experiment(arguments.experiment, REPOSITORY / "pretraining" / "train.py")
    name = re.sub(r"[^\w.-]+", "_", source.name).strip("_")[:80]
    output = arguments.output or Path("diagnosis") / name
    made = diagnose.diagnose(
        diagnose.Request(
            program=source,
            output=output,
            experiment=arguments.experiment,
            against=arguments.against,
            longest_s=arguments.longest_s,
            spec=Spec(
                budget_s=arguments.budget_s,
                only=probes("--probes", arguments.probes),
                excluded=probes("--without", arguments.without),
            ),
            in_place=arguments.in_place,
            keep=arguments.keep,
        )
    )
    print(json.dumps(made, indent=2) if arguments.json else report.text(made))
    if not arguments.json:
        print(f"\nreport  {output / 'report.html'}\n        {output / 'report.json'}")
    return EXIT_DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and give its exit code."""
    return run_command(command, build_parser(), argv)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the program is ended with this command
    sys.exit(main())
