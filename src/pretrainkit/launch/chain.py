"""Whether a job of a chain, or a requeued job, has anything left to do, and the attempt of one that has."""

from __future__ import annotations

import os
from pathlib import Path

from pretrainkit import files
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING
from pretrainkit.jobs.rendezvous import HeadInfo
from pretrainkit.run.checkpoints import newest_committed
from pretrainkit.run.folder import JOB_FILE, OUTCOME_FILE, SOURCE_FILE, RunFolder
from pretrainkit.run.outcome import read_outcome

JOB_VARIABLE = "PRETRAINKIT_JOB_ID"
LOG_VARIABLE = "PRETRAINKIT_LOG"
"""The job's log file."""
CONTINUES_VARIABLE = "PRETRAINKIT_CONTINUES"
"""1 in a job that only continues a run that ran out of time."""
MAX_IDLE_JOBS = 3
"""Jobs in a row without a new checkpoint before a chain ends: the bound of --restart_limit."""


def end_of_chain(folder: RunFolder) -> HeadInfo | None:
    """Why a job that only continues has nothing to do: its predecessor finished or failed. None: it continues."""
    attempts = folder.attempt_folders()
    last = attempts[-1] if attempts else None
    if os.environ.get(CONTINUES_VARIABLE) != "1" or last is None or not (last / OUTCOME_FILE).is_file():
        return None  # without an outcome the predecessor was killed: continue from its last checkpoint
    outcome = read_outcome(last)
    if outcome.exit_code == EXIT_DONE:
        return HeadInfo(refused=f"the run is done ({last}): this job ends")
    if outcome.exit_code != EXIT_STOPPED_AFTER_SAVING:
        return HeadInfo(
            refused=f"the run failed ({last}: {outcome.reason}): this job ends", exit_code=outcome.exit_code
        )
    starts = [_checkpoint_of(attempt) for attempt in attempts[-MAX_IDLE_JOBS:]]
    if len(starts) < MAX_IDLE_JOBS or set(starts) != {_newest_checkpoint(folder)}:
        return None
    return HeadInfo(
        refused=f"{MAX_IDLE_JOBS} jobs in a row ended without a new checkpoint: from start to --time_margin before "
        "--time_limit there was no time for a step",
        exit_code=EXIT_FAILED,
    )


def _checkpoint_of(attempt: Path) -> str | None:
    try:
        return str(files.read_json(attempt / JOB_FILE)["checkpoint"])
    except (OSError, ValueError, KeyError):
        return None


def _newest_checkpoint(folder: RunFolder) -> str:
    """Name of the newest checkpoint's folder, '' before the first."""
    newest = newest_committed(folder.checkpoints)
    return newest.name if newest else ""


def new_attempt(folder: RunFolder, job_dir: Path) -> Path:
    """The folder of the attempt's logs, with run.json, source.txt and the job that it belongs to."""
    log_dir = folder.new_attempt_folder(folder.run_file, job_dir / SOURCE_FILE)
    job = {
        "job_id": os.environ.get(JOB_VARIABLE),
        "log": os.environ.get(LOG_VARIABLE),
        "job_dir": str(job_dir),
        "checkpoint": _newest_checkpoint(folder),
    }
    files.write_json(log_dir / JOB_FILE, job)
    return log_dir
