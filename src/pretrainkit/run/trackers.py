"""Experiment trackers that a run's records are sent to as well: Weights & Biases and MLflow. One rank uses them.

Both have one run per experiment: its id is a file of the run folder, and a restart continues it. Steps that a restart
repeats are not sent twice, unless a kill may have prevented sending them. A server that is down doesn't end or delay a
run: W&B then writes to disk, and MLflow is left out.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlparse

from pretrainkit import files
from pretrainkit.config.run_file import to_json
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import PretrainkitError, RequestError
from pretrainkit.logs import get_logger
from pretrainkit.run.folder import RunFolder

CONNECT_TIMEOUT_S = 20
"""Time that a tracker's server has to answer at the start."""
_MLFLOW_RETRIES = 1
"""MLflow by itself asks an unreachable server for minutes."""

log = get_logger(__name__)


class Tracker:
    """A run of an experiment tracker, with the methods of Lightning's loggers."""

    def __init__(self, name: str, sent_step: int, send: Callable[..., Any], finish: Callable[[int], Any]) -> None:
        """Steps up to `sent_step` were sent by earlier attempts; `finish` gets the last step that was sent."""
        self.name, self._sent_step, self._step = name, sent_step, sent_step
        self._send, self._finish = send, finish

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Send the numbers of a step; later calls have the same or a later step."""
        if step > self._sent_step:
            self._send(metrics, step=step)
            self._step = step

    def finalize(self, status: str) -> None:
        """Send what is still queued."""
        self._finish(self._step)


def uses_trackers(run: ResolvedRun) -> bool:
    """Whether a tracker was asked for."""
    return bool(run.config.tracking.wandb_project or run.config.tracking.mlflow)


def check_trackers(run: ResolvedRun) -> None:
    """Raise RequestError when a requested tracker is not installed, or W&B's key is missing."""
    tracking = run.config.tracking
    for wanted, package, flag in (
        (tracking.wandb_project, "wandb", "--wandb_project"),
        (tracking.mlflow, "mlflow", "--mlflow"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise RequestError(
                f"the package {package} is not installed",
                action=f"pip install {package}, or leave {flag} out; metrics.jsonl and TensorBoard are always written",
                where=flag,
            )
    if tracking.wandb_project:
        _check_wandb_key()


def _check_wandb_key() -> None:
    host = urlparse(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    if os.environ.get("WANDB_MODE", "online") != "online" or os.environ.get("WANDB_API_KEY"):
        return
    try:
        known = netrc.netrc(os.environ.get("NETRC")).authenticators(host or "")
    except (OSError, netrc.NetrcParseError):
        known = None
    if known is None:
        raise RequestError(
            f"no API key of W&B: WANDB_API_KEY isn't set, and .netrc has none for {host}",
            action="set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline and run `wandb sync` later",
            where="--wandb_project",
        )


def wandb_run_id(run: ResolvedRun) -> str | None:
    """Id of the W&B run that a start continues; None without W&B, or for a new run."""
    path = RunFolder.of(run).wandb_id
    return path.read_text(encoding="utf-8").strip() if run.config.tracking.wandb_project and path.exists() else None


def open_trackers(run: ResolvedRun, *, first_step: int, recorded_step: int) -> list[Tracker]:
    """The trackers of an attempt that starts after `first_step`; earlier attempts recorded steps up to `recorded_step`.

    Raises PretrainkitError for a project that W&B can't have.
    """
    trackers = []
    if run.config.tracking.wandb_project:
        trackers.append(_open_wandb(run, run.config.tracking.wandb_project, first_step))
    if run.config.tracking.mlflow and (mlflow := _open_mlflow(run, recorded_step)):
        trackers.append(mlflow)
    return trackers


def _open_wandb(run: ResolvedRun, project: str, first_step: int) -> Tracker:
    """A W&B run; WANDB_MODE=offline keeps it on disk, for `wandb sync` later."""
    os.environ.setdefault("WANDB_SILENT", "true")  # its login doesn't read the settings below
    import wandb

    folder = RunFolder.of(run)
    run_id, sent_file = wandb_run_id(run), folder.wandb_sent_step
    if run_id is None:
        run_id = uuid.uuid4().hex[:8]
        files.write_text(folder.wandb_id, run_id + "\n")
    sent_step = int(sent_file.read_text(encoding="ascii")) if sent_file.exists() else first_step
    init = partial(
        wandb.init,
        project=project,
        id=run_id,
        resume="allow",
        name=folder.path.name,
        dir=str(folder.path),
        config=to_json(run),
        settings=wandb.Settings(console="off", silent=True, disable_git=True, init_timeout=CONNECT_TIMEOUT_S),
    )
    try:
        opened = init()
    except wandb.errors.UsageError as error:
        raise PretrainkitError(f"W&B can't be used: {error}", where="--wandb_project") from error
    except wandb.Error as error:
        reason = str(error).splitlines()[0]
        log.warning("W&B can't be reached, and writes to %s, for `wandb sync`: %s", folder.path / "wandb", reason)
        wandb.teardown()  # its process still holds the run's id
        opened = init(mode="offline")
    log.info("W&B run %s of project %s (%s)", run_id, project, "offline" if opened.offline else opened.url)

    def finish(step: int) -> None:
        opened.finish()
        files.write_text(sent_file, f"{step}\n")

    # With a network, W&B reports the last step it has.
    return Tracker("W&B", max(sent_step, opened.starting_step - 1), opened.log, finish)


def _open_mlflow(run: ResolvedRun, sent_step: int) -> Tracker | None:
    """An MLflow run, at MLFLOW_TRACKING_URI or in a database in the run folder; None where that can't be had."""
    import mlflow

    folder = RunFolder.of(run)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(_MLFLOW_RETRIES))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(CONNECT_TIMEOUT_S // (1 + _MLFLOW_RETRIES)))
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        mlflow.set_tracking_uri(f"sqlite:///{folder.mlflow_database}")
    try:
        mlflow.set_experiment(run.config.experiment)
        run_id = folder.mlflow_id.read_text(encoding="utf-8").strip() if folder.mlflow_id.exists() else None
        active = mlflow.start_run(run_id=run_id, run_name=None if run_id else folder.path.name)
    except Exception as error:  # each store has its own errors
        log.warning(
            "MLflow can't be used, and gets no records of this attempt (look at MLFLOW_TRACKING_URI): %s", error
        )
        return None
    files.write_text(folder.mlflow_id, active.info.run_id + "\n")
    log.info("MLflow run %s at %s", active.info.run_id, mlflow.get_tracking_uri())

    def finish(step: int) -> None:
        mlflow.flush_async_logging()
        mlflow.end_run()

    return Tracker("MLflow", sent_step, partial(mlflow.log_metrics, synchronous=False), finish)
