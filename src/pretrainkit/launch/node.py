"""Starts the ranks of one node as torchrun does, and leaves none of them behind.

    python -m pretrainkit.launch.node --ranks 2 --experiment_dir DIR --log_dir DIR -- train.py --run run.json
    python -m pretrainkit.launch.node --ranks 8 --experiment_dir DIR --job_dir DIR --num_nodes 2 -- train.py --run ...

The second form is for a scheduler's job (`job_node.py`). outcome.json says how the ranks ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrainkit import logs
from pretrainkit.errors import PretrainkitError
from pretrainkit.jobs.rendezvous import Endpoint, open_store
from pretrainkit.launch.supervise import KILL_SIGNAL, GracefulStop, redirect_output, supervise
from pretrainkit.machine import count_cpus
from pretrainkit.run.folder import NODE_LOG, PID_FILE, RANKS_LOCK, RunFolder, locked
from pretrainkit.run.outcome import Outcome, reserve_outcome, write_outcome
from pretrainkit.run.resource_plan import choose_on_node
from pretrainkit.signals import STOP_SIGNALS, adopt_orphans

log = logs.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one node's ranks to their end; the exit code is the attempt's."""
    stop = GracefulStop()
    for number in (*STOP_SIGNALS, KILL_SIGNAL):
        signal.signal(number, stop.request)
    adopt_orphans()
    try:
        return _run(build_parser().parse_args(argv), stop)
    finally:
        # A signal that comes while the interpreter shuts down would replace the ranks' exit code.
        for number in (*STOP_SIGNALS, KILL_SIGNAL):
            signal.signal(number, signal.SIG_IGN)


def threads_per_rank(ranks: int, num_cpus: int) -> str:
    """OMP_NUM_THREADS of the ranks. torchrun would set 1, far too few where a rank computes on the CPU."""
    return str(max(1, num_cpus // ranks))


def _run(arguments: argparse.Namespace, stop: GracefulStop) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", threads_per_rank(arguments.ranks, count_cpus()))
    if arguments.job_dir is not None:
        from pretrainkit.launch.job_node import run_in_job

        logs.configure()
        try:
            return run_in_job(arguments, stop)
        except PretrainkitError as error:
            log.error("%s", error)
            return error.exit_code
    redirect_output(arguments.log_dir / NODE_LOG)
    logs.configure()
    (arguments.log_dir / PID_FILE).write_text(f"{os.getpid()}\n")
    reserve_outcome(arguments.log_dir)
    with locked(RunFolder(arguments.experiment_dir), RANKS_LOCK):
        try:
            if arguments.choose_kernels:
                choose_on_node(RunFolder(arguments.experiment_dir).run_file, arguments.log_dir)
            store = open_store()
        except PretrainkitError as error:
            log.error("%s", error)
            outcome = Outcome(error.exit_code, None, str(error))
        else:
            endpoint = Endpoint("localhost", store.port)
            outcome = supervise(arguments.command, arguments.ranks, arguments.log_dir, endpoint, stop)
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
    parser.add_argument("--choose_kernels", action="store_true", help="choose kernels here, as node 0 of a job does")
    parser.add_argument("--num_nodes", type=int, default=1, help="nodes of the job")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="what the ranks compute on")
    parser.add_argument("--no_check", dest="check", action="store_false", help="skip the preflight of the nodes")
    parser.add_argument("--needed_time_s", type=float, default=0.0, help="job time that saving takes")
    parser.add_argument("--slots_per_gpu", type=int, help="Grid Engine slots that each rank needs")
    parser.add_argument("command", nargs="+", help="Python script of a rank, and its arguments")
    return parser


if __name__ == "__main__":
    sys.exit(main())
