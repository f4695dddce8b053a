"""--follow: shows the logs of submitted jobs until they end, and returns their exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pretrainkit import files
from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING
from pretrainkit.jobs.follow import Follower
from pretrainkit.jobs.registry import SCHEDULERS
from pretrainkit.jobs.scheduler import Run
from pretrainkit.jobs.scripts import CHAIN
from pretrainkit.jobs.submit import SubmittedJob
from pretrainkit.logs import get_logger

_QUERY_INTERVAL_S = 10
"""Interval between queries of the scheduler: they cost every user of a cluster."""
_LATE_S = 15
"""Longest time until the exit code of an ended job is visible on the shared disk."""

log = get_logger(__name__)


def follow(submitted: Sequence[SubmittedJob], run: Run, *, is_chain: bool, requeues: bool) -> int:
    """Show the logs until the jobs end, and return their exit code: of a chain that of the last job that ran, of an
    array the first that isn't 0. Interrupting this doesn't stop the jobs.
    """
    logs = [Path(path) for job in submitted for path in job.logs]
    code = EXIT_DONE
    try:
        with Follower(logs, sys.stderr.buffer):
            waiting = list(submitted)
            for job in waiting:
                codes = [_wait(job, number, run, requeues=requeues) for number in range(len(job.logs))]
                if requeues and codes[0] == EXIT_STOPPED_AFTER_SAVING and (successor := _successor(job)):
                    waiting.append(successor)
                    logs.append(Path(successor.logs[0]))
                if is_chain or requeues:
                    code = codes[0]
                    if code != EXIT_STOPPED_AFTER_SAVING:
                        break
                else:
                    code = code or next((one for one in codes if one), EXIT_DONE)
    except KeyboardInterrupt:
        log.warning("no longer following; the job keeps running. To cancel it: %s", submitted[0].cancel_command)
        raise
    log.info("ended with exit code %d", code)
    return code


def _successor(job: SubmittedJob) -> SubmittedJob | None:
    """The job that a PBS job has submitted to continue it; with other schedulers a requeued job keeps its id."""
    folder = Path(job.folder)
    last = (folder / CHAIN).read_text(encoding="utf-8").splitlines()[-1]
    job_id = SCHEDULERS[job.scheduler].parse_job_id(last)
    return None if job_id == job.job_id else SubmittedJob.of(job.scheduler, job_id, folder, (), job.command)


def _wait(job: SubmittedJob, number: int, run: Run, *, requeues: bool) -> int:
    """The exit code of a job, or of one task of an array."""
    path = Path(job.exit_files[number])

    def has_ended() -> bool:
        code = _read_code(path)
        return code is not None and not (requeues and code == EXIT_STOPPED_AFTER_SAVING)

    while not files.wait_until(has_ended, timeout_s=_QUERY_INTERVAL_S):
        if not job.is_alive(run):
            files.wait_until(has_ended, timeout_s=_LATE_S)
            break
    code = _read_code(path)
    if code is None:
        reason = SCHEDULERS[job.scheduler].end_reason(job.job_id, run)
        details = f" ({reason})" if reason else ""
        log.error("job %s ended without an exit code: killed, cancelled or lost%s", job.job_id, details)
    return EXIT_FAILED if code is None else code


def _read_code(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
