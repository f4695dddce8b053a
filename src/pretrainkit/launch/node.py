"""Starts the ranks of one node with torchrun's elastic agent, and sees to it that none is left behind.

    python -m pretrainkit.launch.node --ranks 2 --experiment_dir DIR --log_dir DIR -- train.py --run run.json
    python -m pretrainkit.launch.node --ranks 8 --experiment_dir DIR --job_dir DIR --num_nodes 2 -- train.py --run ...

The second form is that of a scheduler's job (`job_node.py`). How it ended is written to outcome.json.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from pretrainkit import logs
from pretrainkit.errors import PretrainkitError
from pretrainkit.launch.agent import Agent
from pretrainkit.launch.processes import adopt_orphans
from pretrainkit.launch.supervise import KILL_SIGNAL, NODE_LOG, PID_FILE, StopRequests, supervise, write_everything_to
from pretrainkit.run.folder import RANKS_LOCK, locked
from pretrainkit.run.outcome import write_outcome
from pretrainkit.signals import STOP_SIGNALS

log = logs.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one node's ranks to their end; the exit code is the attempt's."""
    requests = StopRequests()
    for number in (*STOP_SIGNALS, KILL_SIGNAL):
        signal.signal(number, requests.add)
    adopt_orphans()
    try:
        return _run(build_parser().parse_args(argv), requests)
    finally:
        # While the interpreter ends, a late signal would kill it, and its exit code would no longer be the ranks'.
        for number in (*STOP_SIGNALS, KILL_SIGNAL):
            signal.signal(number, signal.SIG_IGN)


def _run(arguments: argparse.Namespace, requests: StopRequests) -> int:
    if arguments.job_dir is not None:
        from pretrainkit.launch.job_node import run_in_job

        logs.configure()
        try:
            return run_in_job(arguments, requests)
        except PretrainkitError as error:
            log.error("%s", error)
            return error.exit_code
    write_everything_to(arguments.log_dir / NODE_LOG)
    logs.configure()
    (arguments.log_dir / PID_FILE).write_text(f"{os.getpid()}\n")
    with locked(arguments.experiment_dir, RANKS_LOCK):
        agent = Agent(arguments.ranks, arguments.log_dir, arguments.command)
        outcome = supervise(agent, requests)
        write_outcome(arguments.log_dir, outcome)
    return outcome.exit_code


def build_parser() -> argparse.ArgumentParser:
    """The module's arguments."""
    parser = argparse.ArgumentParser(prog="pretrainkit.launch.node", allow_abbrev=False)
    parser.add_argument("--ranks", type=int, required=True, help="ranks of this node")
    parser.add_argument("--experiment_dir", type=Path, required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--log_dir", type=Path, help="existing folder of this attempt's logs")
    where.add_argument("--job_dir", type=Path, help="folder of the scheduler's job; node 0 makes the attempt's")
    parser.add_argument("--num_nodes", type=int, default=1, help="nodes of the job")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="what the ranks compute on")
    parser.add_argument("--no_check", dest="check", action="store_false", help="leave out the preflight of the nodes")
    parser.add_argument("--needed_time_s", type=float, default=0.0, help="job time that saving takes")
    parser.add_argument("--slots_per_gpu", type=int, help="Grid Engine slots that each rank needs")
    parser.add_argument("command", nargs="+", help="Python script of a rank, and its arguments")
    return parser


def _exit(code: int) -> None:
    """End this process. An agent that still waits for other nodes would be torn down in the middle, and abort it."""
    if any(isinstance(thread, Agent) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    _exit(main())
