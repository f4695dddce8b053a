#!/usr/bin/env python
"""Preflight of a node or container: GPUs, driver, all-reduce, disk, clock, packages and time left, as one table.

With --software also what an image must have: imports of the engine, caches outside the home, no foreign packages.

With --num_nodes run it once on every node of a job; then they also try an all-reduce over all of them:

    srun --ntasks-per-node=1 python tools/check_node.py --output_dir experiments   (Slurm says the rest)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pretrainkit.cli import Parser, run_command, value_of
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, RequestError
from pretrainkit.machine import count_gpus
from pretrainkit.preflight.node import NodeCheckRequest
from pretrainkit.preflight.software import CONSTRAINTS
from pretrainkit.units import parse_bytes, parse_duration


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(
        prog="check_node.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
        epilog="Exit codes: 0 good (warnings may be shown); 1 a node is bad, it is named; 2 wrong request.",
    )
    what = parser.add_argument_group("what the ranks will need")
    what.add_argument("--output_dir", type=Path, default=Path(), help="folder that runs write to (.)")
    what.add_argument("--num_gpus", "-G", type=int, help="ranks of a node; unset: one per GPU, or 2 on CPU")
    what.add_argument(
        "--accelerator", choices=("auto", "cpu", "gpu"), default="auto", help="auto: gpu where there is one"
    )
    what.add_argument(
        "--needed_space",
        type=value_of(parse_bytes),
        default=0,
        metavar="SIZE",
        help="free space needed there, such as 500GB (0)",
    )
    what.add_argument(
        "--needed_time",
        type=value_of(parse_duration),
        default=0.0,
        metavar="TIME",
        help="job time needed, [D-]HH:MM:SS (0)",
    )
    what.add_argument("--constraints", type=Path, help="file of tested versions; unset: the checkout's constraints.txt")
    what.add_argument(
        "--software", action="store_true", help="import the engine, check caches and packages of the home"
    )
    what.add_argument(
        "--kept", type=Path, help="with an image of containers/: packages that it must keep, name==version"
    )
    nodes = parser.add_argument_group("several nodes (under Slurm's srun all are known)")
    nodes.add_argument("--num_nodes", "-N", type=int, help="nodes, each of which runs this command")
    nodes.add_argument("--node_rank", type=int, help="which of them this is, from 0")
    nodes.add_argument("--meeting", metavar="WORD", help="the same on all nodes, another for each check")
    parser.add_argument("--quick", action="store_true", help="no all-reduce, which with all else takes a second")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="longest wait for each probe (120)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def command(arguments: argparse.Namespace) -> int:
    """Look, print the reports of all nodes (on node 0), and tell by the exit code."""
    from pretrainkit.preflight.cluster import check_nodes, find_place

    place = find_place(os.environ, num_nodes=arguments.num_nodes, node=arguments.node_rank, meeting=arguments.meeting)
    reports, network = check_nodes(make_request(arguments), place)
    is_good = all(report.is_good for report in reports) and not (network and network.is_failed)
    if place.node == 0 or len(reports) == 1:
        if arguments.json:
            found = {"good": is_good, "nodes": [report.to_json() for report in reports]}
            print(json.dumps(found | {"network": asdict(network) if network else None}, indent=2))
        else:
            print("\n".join(report.describe() for report in reports))
            if network:
                print(f"all nodes\n{network.describe()}")
    return EXIT_DONE if is_good else EXIT_FAILED


def make_request(arguments: argparse.Namespace) -> NodeCheckRequest:
    """What to look at, with what this machine has filled in."""
    num_gpus = count_gpus() if arguments.accelerator != "cpu" else 0
    accelerator = arguments.accelerator if arguments.accelerator != "auto" else "gpu" if num_gpus else "cpu"
    for flag, path in (("--constraints", arguments.constraints), ("--kept", arguments.kept)):
        if path and not path.is_file():
            raise RequestError("no such file", where=f"{flag} {path}")
    return NodeCheckRequest(
        ranks=arguments.num_gpus or (max(num_gpus, 1) if accelerator == "gpu" else 2),
        accelerator=accelerator,
        output_dir=arguments.output_dir,
        needed_bytes=arguments.needed_space,
        needed_time_s=arguments.needed_time,
        constraints=arguments.constraints or CONSTRAINTS,
        collectives=not arguments.quick,
        timeout_s=arguments.timeout,
        software=arguments.software,
        kept=arguments.kept,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(command, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
