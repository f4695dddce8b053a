"""From a resolved run to a job of a scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import EXIT_DONE, RequestError
from pretrainkit.jobs import submit, watch
from pretrainkit.jobs.job import Job
from pretrainkit.jobs.registry import scheduler_of
from pretrainkit.jobs.run_job import job_of
from pretrainkit.jobs.scheduler import Run
from pretrainkit.jobs.secrets import passed_on
from pretrainkit.jobs.snapshot import copy_source
from pretrainkit.logs import get_logger
from pretrainkit.run import initial_weights
from pretrainkit.run.folder import (
    JOBS,
    LAUNCHER_LOCK,
    RANKS_LOCK,
    RUN_FILE,
    locked,
    will_continue,
    write_run_file,
)
from pretrainkit.run.source import describe
from pretrainkit.signals import STOP_SIGNALS, stopped_by_signals

CONTINUE = "continue"
"""Start mode of a run that goes on from its own checkpoint (`pretrainkit.run.resume_plan`)."""

log = get_logger(__name__)


def planned_job(run: ResolvedRun, train_script: Path) -> Job:
    """The job that would be submitted next for a run. Raises RequestError for what it can't have."""
    experiment_dir = Path(run.experiment_dir)
    folder = submit.next_folder(experiment_dir / JOBS)
    return job_of(as_read(run), folder=folder, run_file=experiment_dir / RUN_FILE, train_script=train_script.resolve())


def start_job(
    run: ResolvedRun,
    *,
    train_script: Path,
    command_line: Sequence[str],
    check: Callable[[ResolvedRun], ResolvedRun],
    follow: bool,
) -> int:
    """Submit the job of a run; wait for its end with `follow`. Raises PretrainkitError when it isn't taken.

    Nothing is changed on disk unless the scheduler takes it, but a model that was converted stays.
    """
    experiment_dir = Path(run.experiment_dir)
    is_new = not experiment_dir.exists()
    commands = scheduler_of(run.config.launch).runner(run.config.launch)
    try:
        with locked(experiment_dir, LAUNCHER_LOCK):
            with locked(experiment_dir, RANKS_LOCK):
                job = planned_job(run, train_script)
                _refuse_second(experiment_dir, commands)
                run = check(run)
                provide_weights(run)
            with _restored_on_failure(experiment_dir / RUN_FILE):
                write_run_file(run)
                submitted = submit.submit(
                    job,
                    copy_source=lambda folder: copy_source(folder, train_script.resolve()),
                    source_text=describe(run, command_line),
                    secrets=passed_on(os.environ)[1],
                )
    except BaseException:
        if is_new:
            _remove_empty(experiment_dir)
        raise
    submit.announce(submitted)
    if not follow:
        return EXIT_DONE
    launch = run.config.launch
    return watch.follow(submitted, commands, is_chain=launch.chain > 1, requeues=launch.requeue)


def as_read(run: ResolvedRun) -> ResolvedRun:
    """The run with what its nodes read: a container can't mount first weights that are gone once it has checkpoints."""
    initial = run.initial_checkpoint
    if initial and not Path(initial).exists() and will_continue(Path(run.experiment_dir)):
        return dataclasses.replace(run, initial_checkpoint=None)
    return run


def provide_weights(run: ResolvedRun) -> None:
    """Convert the weights that the run starts from, if they are a Hugging Face folder; none are read to continue."""
    if run.config.nemo_model is not None and run.start_mode != CONTINUE:
        initial = initial_weights.locate(run.config.nemo_model, Path(run.experiment_dir).parent)
        with stopped_by_signals("give the same command again", STOP_SIGNALS):
            initial_weights.provide(initial, run.model)


def _refuse_second(experiment_dir: Path, commands: Run) -> None:
    """Two jobs of one experiment would train the same steps: refuse while an earlier one waits or runs."""
    alive = [job for job in submit.read_records(experiment_dir / JOBS)[-1:] if job.is_alive(commands)]
    if alive:
        raise RequestError(
            f"job {alive[0].job_id} of this experiment waits or runs",
            action=f"wait for it, or cancel it ({alive[0].cancel_command}); --chain submits several in a row",
            where=str(experiment_dir),
        )


@contextlib.contextmanager
def _restored_on_failure(path: Path) -> Iterator[None]:
    before = path.read_bytes() if path.exists() else None
    try:
        yield
    except BaseException:
        if before is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(before)
        raise


def _remove_empty(experiment_dir: Path) -> None:
    """Remove the folder of an experiment that holds nothing but our locks."""
    for name in (LAUNCHER_LOCK, RANKS_LOCK):
        (experiment_dir / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        experiment_dir.rmdir()
