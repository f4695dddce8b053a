"""Experiment trackers that a run's records are sent to as well: Weights & Biases and MLflow. One rank uses them.

Both have one run per experiment: its id is a file of the run folder, and a restart continues it. Steps that a restart
repeats are not sent twice, unless a kill may have prevented sending them.
"""

from __future__ import annotations

import importlib.util
import os
import uuid
from collections.abc import Callable
from typing import Any

from pretrainkit import files
from pretrainkit.config.run_file import to_json
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import PretrainkitError, RequestError
from pretrainkit.logs import get_logger
from pretrainkit.run.folder import RunFolder

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


def check_trackers(run: ResolvedRun) -> None:
    """Raise RequestError when a requested tracker is not installed."""
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


def wandb_run_id(run: ResolvedRun) -> str | None:
    """Id of the W&B run that a start continues; None without W&B, or for a new run."""
    path = RunFolder.of(run).wandb_id
    return path.read_text(encoding="utf-8").strip() if run.config.tracking.wandb_project and path.exists() else None


def open_trackers(run: ResolvedRun, *, first_step: int, recorded_step: int) -> list[Tracker]:
    """The trackers of an attempt that starts after `first_step`; earlier attempts recorded steps up to `recorded_step`.

    Raises PretrainkitError when one fails to start.
    """
    trackers = []
    if run.config.tracking.wandb_project:
        trackers.append(_open_wandb(run, run.config.tracking.wandb_project, first_step))
    if run.config.tracking.mlflow:
        trackers.append(_open_mlflow(run, recorded_step))
    return trackers


def _open_wandb(run: ResolvedRun, project: str, first_step: int) -> Tracker:
    """A W&B run; WANDB_MODE=offline keeps it on disk, for `wandb sync` later."""
    import wandb

    folder = RunFolder.of(run)
    run_id, sent_file = wandb_run_id(run), folder.wandb_sent_step
    if run_id is None:
        run_id = uuid.uuid4().hex[:8]
        files.write_text(folder.wandb_id, run_id + "\n")
    sent_step = int(sent_file.read_text(encoding="ascii")) if sent_file.exists() else first_step
    try:
        opened = wandb.init(
            project=project,
            id=run_id,
            resume="allow",
            name=folder.path.name,
            dir=str(folder.path),
            config=to_json(run),
            settings=wandb.Settings(console="off", silent=True, disable_git=True),
        )
    except wandb.Error as error:
        raise PretrainkitError(
            f"W&B can't be used: {error}",
            action="set WANDB_API_KEY, or WANDB_MODE=offline where there is no network",
            where="--wandb_project",
        ) from error
    log.info("W&B run %s of project %s (%s)", run_id, project, "offline" if opened.offline else opened.url)

    def finish(step: int) -> None:
        opened.finish()
        files.write_text(sent_file, f"{step}\n")

    # With a network, W&B reports the last step it has.
    return Tracker("W&B", max(sent_step, opened.starting_step - 1), opened.log, finish)


def _open_mlflow(run: ResolvedRun, sent_step: int) -> Tracker:
    """An MLflow run, at MLFLOW_TRACKING_URI or in a database in the run folder."""
    import mlflow

    folder = RunFolder.of(run)
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        mlflow.set_tracking_uri(f"sqlite:///{folder.mlflow_database}")
    try:
        mlflow.set_experiment(run.config.experiment)
        run_id = folder.mlflow_id.read_text(encoding="utf-8").strip() if folder.mlflow_id.exists() else None
        active = mlflow.start_run(run_id=run_id, run_name=None if run_id else folder.path.name)
    except Exception as error:  # each store has its own errors
        raise PretrainkitError(
            f"MLflow can't be used: {error}", action="look at MLFLOW_TRACKING_URI", where="--mlflow"
        ) from error
    files.write_text(folder.mlflow_id, active.info.run_id + "\n")
    log.info("MLflow run %s at %s", active.info.run_id, mlflow.get_tracking_uri())
    return Tracker("MLflow", sent_step, mlflow.log_metrics, lambda step: mlflow.end_run())
