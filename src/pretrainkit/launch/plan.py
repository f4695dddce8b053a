"""What an attempt on this machine starts: one node process, which starts the ranks. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.jobs.container import Container
from pretrainkit.jobs.run_job import NODE_MODULE, python_of, rank_environment


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that starting an attempt needs."""

    experiment_dir: Path
    run_file: Path
    log_dir: Path
    ranks_per_node: int
    environment: dict[str, str]
    """Variables that the ranks need; those that are set in the launcher's environment win."""
    train_script: Path
    """The script that every rank runs."""
    asked_environment: dict[str, str] = field(default_factory=dict)
    """Variables of --env and the site, which win over all others."""
    container: Container | None = None
    python: str = sys.executable
    """The interpreter of the node process, which starts the ranks with its own."""

    @property
    def node_arguments(self) -> list[str]:
        """Arguments of the module that starts the ranks."""
        return [
            *("--ranks", str(self.ranks_per_node)),
            *("--experiment_dir", str(self.experiment_dir)),
            *("--log_dir", str(self.log_dir)),
            *(["--choose_kernels"] if self.container else []),
            "--",
            *self.rank_command[1:],
        ]

    @property
    def node_command(self) -> list[str]:
        """Command that starts the ranks, in the container if there is one; else with this interpreter."""
        command = [self.python, "-m", NODE_MODULE, *self.node_arguments]
        if self.container is None:
            return command
        return ["apptainer", "exec", *self.container.apptainer_options(), self.container.image, *command]

    @property
    def rank_command(self) -> list[str]:
        """Command of every rank."""
        return [sys.executable, str(self.train_script), "--run", str(self.run_file)]


def plan_launch(
    run: ResolvedRun, *, run_file: Path, log_dir: Path, train_script: Path, container: Container | None = None
) -> LaunchPlan:
    """The plan of an attempt on this machine."""
    config = run.config.launch
    return LaunchPlan(
        experiment_dir=Path(run.experiment_dir),
        run_file=run_file,
        log_dir=log_dir,
        ranks_per_node=config.num_gpus,
        environment=rank_environment(run),
        train_script=train_script,
        asked_environment=dict(config.environment),
        container=container,
        python=python_of(config, container is not None),
    )
