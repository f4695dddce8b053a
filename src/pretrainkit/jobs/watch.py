"""--follow: showing the logs of submitted jobs until they end, and ending with their exit code."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pretrainkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED_AFTER_SAVING, PretrainkitError
from pretrainkit.jobs import schedulers
from pretrainkit.jobs.follow import Follower
from pretrainkit.jobs.scripts import CHAIN
from pretrainkit.jobs.submit import SubmittedJob
from pretrainkit.logs import get_logger

_POLL_S = 0.5
_ASK_S = 10
"""How often the scheduler is asked: every user of a cluster pays for that."""
_LATE_S = 15
"""How long an exit code may take to be seen on the shared disk, after the job has ended."""

log = get_logger(__name__)


def follow(submitted: Sequence[SubmittedJob], commands: schedulers.Commands, *, is_chain: bool, requeues: bool) -> int:
    """Show the logs until the jobs end.

    The exit code is that of the jobs: of a chain the last that ran, of an array the first that isn't 0. When this is
    interrupted the jobs go on.
    """
    logs = [Path(path) for job in submitted for path in job.logs]
    code = EXIT_DONE
    try:
        with Follower(logs, sys.stderr.buffer):
            waiting = list(submitted)
            for job in waiting:
                codes = [_wait(job, number, commands, requeues=requeues) for number in range(len(job.logs))]
                if requeues and codes[0] == EXIT_STOPPED_AFTER_SAVING and (successor := _resubmitted(job)):
                    waiting.append(successor)
                    logs.append(Path(successor.logs[0]))
                if is_chain or requeues:
                    code = codes[0]
                    if code != EXIT_STOPPED_AFTER_SAVING:
                        break
                else:
                    code = code or next((one for one in codes if one), EXIT_DONE)
    except KeyboardInterrupt:
        log.warning("not followed any more; the job goes on. To cancel it: %s", submitted[0].cancel_command)
        raise
    log.info("ended with exit code %d", code)
    return code


def _resubmitted(job: SubmittedJob) -> SubmittedJob | None:
    """The job that a PBS job has submitted to go on with; the others keep their id."""
    if job.scheduler != "pbs":
        return None
    last = (Path(job.folder) / CHAIN).read_text(encoding="utf-8").splitlines()[-1]
    job_id = schedulers.parse_job_id("pbs", last)
    if job_id == job.job_id:
        return None
    logs, exit_files = (
        tuple(str(Path(path).with_name(Path(path).name.replace(job.job_id, job_id))) for path in paths)
        for paths in (job.logs, job.exit_files)
    )
    return replace(job, job_id=job_id, logs=logs, exit_files=exit_files)


def _wait(job: SubmittedJob, number: int, commands: schedulers.Commands, *, requeues: bool) -> int:
    """The exit code of a job, or of one task of an array."""
    path = Path(job.exit_files[number])
    asked_s, gone_s = time.monotonic(), None
    while True:
        code = _read_code(path)
        if code is not None and not (requeues and code == EXIT_STOPPED_AFTER_SAVING):
            return code
        now_s = time.monotonic()
        if gone_s is None and now_s - asked_s > _ASK_S:
            asked_s = now_s
            if not schedulers.is_alive(job.scheduler, job.job_id, commands):
                gone_s = now_s
        if gone_s is not None and now_s - gone_s > _LATE_S:
            if code is not None:
                return code
            log.error("job %s ended without an exit code: %s", job.job_id, _reason(job, commands))
            return EXIT_FAILED
        time.sleep(_POLL_S)


def _read_code(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _reason(job: SubmittedJob, commands: schedulers.Commands) -> str:
    """What the scheduler remembers of a job that it ended itself."""
    unknown = "killed, cancelled or lost"
    words = {
        "slurm": ["scontrol", "show", "job", job.job_id],
        "sge": ["qacct", "-j", job.job_id],
        "pbs": ["qstat", "-x", "-f", job.job_id],
    }[job.scheduler]
    try:
        said = commands.run(words)
    except PretrainkitError:
        return unknown
    found = re.findall(
        r"(?:JobState|Reason|ExitCode)=\S+|^(?:failed|exit_status|maxvmem) +.*$|Exit_status = .*|comment = .*",
        said,
        re.MULTILINE,
    )
    return f"{unknown} ({'; '.join(' '.join(item.split()) for item in found)})" if found else unknown
