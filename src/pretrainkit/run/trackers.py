"""Experiment trackers that a run's records are sent to as well: Weights & Biases and MLflow. One rank uses them.

Both know one run per experiment: its id lies in the experiment's folder, and a restart goes on with it. Steps that
a restart does again are not sent twice, unless a kill may have kept them from being sent.
"""

from __future__ import annotations

import importlib.util
import os
import uuid
from pathlib import Path
from typing import Any, Protocol

from pretrainkit import files
from pretrainkit.config.run_file import to_json
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.errors import PretrainkitError, RequestError
from pretrainkit.logs import get_logger

WANDB_ID_FILE = "wandb_id.txt"
WANDB_SENT_FILE = "wandb_sent_step.txt"
"""The last step that W&B surely has: written when an attempt has ended in order."""
MLFLOW_ID_FILE = "mlflow_id.txt"

log = get_logger(__name__)


class Tracker(Protocol):
    """Where numbers go, by optimizer step."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send the numbers of a step; later calls have the same or a later step."""

    def finish(self) -> None:
        """Send what is left."""


def check_trackers(run: ResolvedRun) -> None:
    """Raise RequestError when a tracker that is asked for is not installed."""
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
    """Id of the W&B run that a start goes on with; None when it uses none, or begins a new one."""
    path = Path(run.experiment_dir) / WANDB_ID_FILE
    return path.read_text(encoding="utf-8").strip() if run.config.tracking.wandb_project and path.exists() else None


def open_trackers(run: ResolvedRun, *, first_step: int, recorded_step: int) -> list[Tracker]:
    """The trackers of an attempt that begins after `first_step`; those before it recorded steps up to `recorded_step`.

    Raises PretrainkitError when one can't be used.
    """
    trackers: list[Tracker] = []
    if run.config.tracking.wandb_project:
        trackers.append(WandbTracker(run, run.config.tracking.wandb_project, first_step))
    if run.config.tracking.mlflow:
        trackers.append(MlflowTracker(run, recorded_step))
    return trackers


class WandbTracker:
    """A W&B run; WANDB_MODE=offline keeps it on disk, for `wandb sync` later."""

    def __init__(self, run: ResolvedRun, project: str, first_step: int) -> None:
        import wandb

        experiment = Path(run.experiment_dir)
        run_id = wandb_run_id(run)
        if run_id is None:
            run_id = uuid.uuid4().hex[:8]
            files.write_text(experiment / WANDB_ID_FILE, run_id + "\n")
        self._sent_file = experiment / WANDB_SENT_FILE
        sent_step = int(self._sent_file.read_text(encoding="ascii")) if self._sent_file.exists() else first_step
        try:
            self._run = wandb.init(
                project=project,
                id=run_id,
                resume="allow",
                name=experiment.name,
                dir=str(experiment),
                config=to_json(run),
                settings=wandb.Settings(console="off", silent=True, disable_git=True),
            )
        except wandb.Error as error:
            raise PretrainkitError(
                f"W&B can't be used: {error}",
                action="set WANDB_API_KEY, or WANDB_MODE=offline where there is no network",
                where="--wandb_project",
            ) from error
        # Where there is a network, W&B tells how far it got.
        self._sent_step = self._step = max(sent_step, self._run.starting_step - 1)
        log.info("W&B run %s of project %s (%s)", run_id, project, "offline" if self._run.offline else self._run.url)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send the numbers of a step, unless an earlier attempt did."""
        if step > self._sent_step:
            self._run.log(values, step=step)
            self._step = step

    def finish(self) -> None:
        """Wait until all is sent."""
        self._run.finish()
        files.write_text(self._sent_file, f"{self._step}\n")


class MlflowTracker:
    """An MLflow run, at MLFLOW_TRACKING_URI or in a file below the experiment's folder."""

    def __init__(self, run: ResolvedRun, sent_step: int) -> None:
        import mlflow

        experiment = Path(run.experiment_dir)
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            mlflow.set_tracking_uri(f"sqlite:///{experiment / 'mlflow.db'}")
        self._sent_step, self._mlflow = sent_step, mlflow
        id_file = experiment / MLFLOW_ID_FILE
        try:
            mlflow.set_experiment(run.config.experiment)
            run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
            active = mlflow.start_run(run_id=run_id, run_name=None if run_id else experiment.name)
        except Exception as error:  # its stores raise errors of their own kinds
            raise PretrainkitError(
                f"MLflow can't be used: {error}", action="look at MLFLOW_TRACKING_URI", where="--mlflow"
            ) from error
        files.write_text(id_file, active.info.run_id + "\n")
        log.info("MLflow run %s at %s", active.info.run_id, mlflow.get_tracking_uri())

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send the numbers of a step, unless an earlier attempt did."""
        if step > self._sent_step:
            self._mlflow.log_metrics(values, step=step)

    def finish(self) -> None:
        """Close the run."""
        self._mlflow.end_run()


def numbers_of(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a training or validation record, by name."""
    return {
        name: value
        for name, value in record.items()
        if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
