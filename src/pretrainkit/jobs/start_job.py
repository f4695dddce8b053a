"""From a resolved run to a job of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import EXIT_DONE, RequestError
from pretrainkit.jobs import submit, watch
from pretrainkit.jobs.job import Job
from pretrainkit.jobs.registry import scheduler_of
from pretrainkit.jobs.run_job import job_of
from pretrainkit.jobs.scheduler import Run
from pretrainkit.run import initial_weights
from pretrainkit.run.folder import LAUNCHER_LOCK, RANKS_LOCK, RunFolder, locked
from pretrainkit.run.identity import write_run_file
from pretrainkit.run.resource_plan import finalize_run
from pretrainkit.run.source import describe


def planned_job(run: ResolvedRun, train_script: Path) -> Job:
    """The job that would be submitted next for a run. Raises RequestError for what it can't have."""
    folder = RunFolder.of(run)
    job_folder = submit.next_folder(folder.jobs)
    return job_of(run, folder=job_folder, run_file=folder.run_file, train_script=train_script.resolve())


def start_job(run: ResolvedRun, *, train_script: Path, command_line: Sequence[str], follow: bool) -> int:
    """Submit the job of a run; wait for its end with `follow`.

    Raises PretrainkitError when the scheduler refuses it: run.json and converted weights stay, the job's folder
    doesn't.
    """
    folder, commands = RunFolder.of(run), scheduler_of(run.config.launch).runner(run.config.launch)
    with locked(folder, LAUNCHER_LOCK):
        with locked(folder, RANKS_LOCK):
            job = planned_job(run, train_script)
            _refuse_second(folder, commands)
            run = finalize_run(run)
            initial_weights.provide_for(run)
        write_run_file(run)
        submitted = submit.submit(job, train_script.resolve(), describe(run, command_line))
    submit.announce(submitted)
    if not follow:
        return EXIT_DONE
    launch = run.config.launch
    return watch.follow(submitted, commands, is_chain=launch.chain > 1, requeues=launch.requeue)


def _refuse_second(folder: RunFolder, commands: Run) -> None:
    """Two jobs of one experiment would train the same steps: refuse while an earlier one is queued or running."""
    for job in submit.read_records(folder.jobs)[-1:]:
        if job.is_alive(commands):
            raise RequestError(
                f"job {job.job_id} of this experiment is queued or running",
                action=f"wait for it, or cancel it ({job.cancel_command}); --chain submits several in a row",
                where=str(folder.path),
            )
