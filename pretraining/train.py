#!/usr/bin/env python
"""One rank of a training run: started by torchrun or srun with RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE.

It reads everything it needs from run.json, which pretrain.py writes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrainkit import logs
from pretrainkit.cli import Parser, run_command
from pretrainkit.config.run_file import read_run
from pretrainkit.errors import EXIT_DONE, EXIT_STOPPED_AFTER_SAVING, RequestError
from pretrainkit.imports import heavy_imports, leave_out
from pretrainkit.run import resume_plan
from pretrainkit.signals import RankStopRequests

log = logs.get_logger("train")


PR_SET_PDEATHSIG = 1
"""prctl option (linux/prctl.h): the signal that a process gets when its parent dies."""


def build_parser() -> Parser:
    parser = Parser(prog="train.py", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="run.json of the experiment")
    return parser


def command(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(OSError, AttributeError):
        # Were the process that started the ranks killed, they would hold their GPUs; so they save and end.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    requests = RankStopRequests()  # from here on a signal means: finish the step, save, end
    run = read_run(arguments.run)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != run.world_size:
        raise RequestError(
            f"{world_size} processes were started",
            needed=f"{run.world_size}, as the run was resolved for",
            action="start it with pretrain.py, or with as many ranks as run.json says",
            where=str(arguments.run),
        )
    if run.kernels is None:
        raise RequestError(
            "the run's kernels are not chosen",
            needed="kernels in run.json, as pretrain.py writes them, or the first node of a job",
            action="start it with pretrain.py",
            where=str(arguments.run),
        )
    rank, local_world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    plan = resume_plan.plan_start(run)
    if plan.is_done:
        log.info("nothing to do: %d of %d steps are done", plan.step, run.max_steps)
        return EXIT_DONE
    if rank == 0:
        resume_plan.prepare(run, plan)
    if run.kernels.layer_spec == "torch":
        # Importing it takes seconds, memory of the GPU, and may bring a cuDNN with which torch doesn't run attention.
        leave_out("transformer_engine")
    with heavy_imports():
        if run.accelerator == "cpu":
            from pretrainkit.megatron import cpu

            cpu.bridge()
        from pretrainkit.engine import train
    logs.quiet_upstream()
    done = train.train(run, plan, rank=rank, local_world_size=local_world_size, requests=requests)
    return EXIT_DONE if done else EXIT_STOPPED_AFTER_SAVING


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_command(command, build_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
