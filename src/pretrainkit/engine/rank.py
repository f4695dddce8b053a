"""One rank, from run.json and torchrun's variables to its exit code. NeMo is imported once there is something to do."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from pretrainkit import logs
from pretrainkit.config.run_file import read_run
from pretrainkit.config.validate import shared_memory_problems
from pretrainkit.engine.progress import Progress
from pretrainkit.errors import EXIT_DONE, EXIT_STOPPED_AFTER_SAVING, RequestError
from pretrainkit.imports import heavy_imports
from pretrainkit.machine import usable_shared_memory
from pretrainkit.run import progress as records
from pretrainkit.run import resume_plan
from pretrainkit.run.process_limits import limit_problems
from pretrainkit.signals import RankStopRequests, die_with_parent

log = logs.get_logger(__name__)


def run_rank(run_file: Path) -> int:
    """Train the run of a run.json on this rank; its exit code. Raises PretrainkitError."""
    die_with_parent(signal.SIGTERM)  # without what started the ranks they would hold their GPUs: they save and end
    requests = RankStopRequests()  # from here on a signal means: finish the step, save, end
    run = read_run(run_file)
    rank, world_size, local_world_size = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))
    )
    progress = Progress(rank)
    if folder := os.environ.get(records.FOLDER_VARIABLE):
        progress.publish(Path(folder), run_file.parent)
    if world_size != run.world_size:
        raise RequestError(
            f"{world_size} processes were started",
            needed=f"{run.world_size}, as the run was resolved for",
            action="start it with pretrain.py, or with as many ranks as run.json says",
            where=str(run_file),
        )
    if run.kernels is None:
        raise RequestError(
            "the run's kernels are not chosen",
            needed="kernels in run.json, as pretrain.py writes them, or the first node of a job",
            action="start it with pretrain.py",
            where=str(run_file),
        )
    plan = resume_plan.plan_start(run)
    if plan.step >= run.max_steps:
        log.info("nothing to do: %d of %d steps are done", plan.step, run.max_steps)
        return EXIT_DONE
    # A job may run without a preflight, and a container has its own /dev/shm.
    RequestError.raise_all([*shared_memory_problems(run.config, usable_shared_memory()), *limit_problems(run)])
    if run.kernels.layer_spec == "torch":
        # Importing it takes seconds, memory of the GPU, and may bring a cuDNN with which torch doesn't run attention.
        sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    progress.phase(records.IMPORTING)
    if rank == 0:
        log.info(records.IMPORTING)
    with heavy_imports():
        if run.accelerator == "cpu":
            from pretrainkit.megatron import cpu

            cpu.bridge()
        from pretrainkit.engine.intact import intact_plan, with_skipped_of_first_rank
    plan = intact_plan(run, plan, rank=rank, world_size=world_size)
    plan = with_skipped_of_first_rank(plan, rank=rank, world_size=world_size)
    if rank == 0:
        resume_plan.prepare(run, plan)
    with heavy_imports():
        from pretrainkit.engine import train
    logs.quiet_upstream()
    done = train.train(run, plan, rank=rank, local_world_size=local_world_size, requests=requests, progress=progress)
    return EXIT_DONE if done else EXIT_STOPPED_AFTER_SAVING
