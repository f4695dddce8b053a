"""What an attempt of a run starts: one process per node, which starts its ranks. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.jobs.container import Container
from pretrainkit.jobs.run_job import NODE_MODULE


@dataclass(frozen=True)
class LaunchPlan:
    """All that an executor has to know to start an attempt."""

    experiment_dir: Path
    run_file: Path
    log_dir: Path
    ranks_per_node: int
    environment: dict[str, str]
    """Variables that the ranks need beyond those of the launcher; a variable that the user set wins."""
    train_script: Path
    """What every rank runs."""
    asked_environment: dict[str, str] = field(default_factory=dict)
    """Variables of --env and the site; they win."""
    container: Container | None = None
    python: str = sys.executable
    """The interpreter of the node process, which starts the ranks with its own."""

    @property
    def node_arguments(self) -> list[str]:
        """Arguments of the module that starts one node's ranks."""
        return [
            *("--ranks", str(self.ranks_per_node)),
            *("--experiment_dir", str(self.experiment_dir)),
            *("--log_dir", str(self.log_dir)),
            "--",
            *self.rank_command[1:],
        ]

    @property
    def node_command(self) -> list[str]:
        """Command that starts one node's ranks, in the container if there is one.

        Without, the interpreter is this one, whatever PATH says.
        """
        command = [self.python, "-m", NODE_MODULE, *self.node_arguments]
        if self.container is None:
            return command
        return ["apptainer", "exec", *self.container.apptainer_options(), self.container.image, *command]

    @property
    def rank_command(self) -> list[str]:
        """Command of every rank."""
        return [sys.executable, str(self.train_script), "--run", str(self.run_file)]


def plan_launch(
    run: ResolvedRun,
    *,
    run_file: Path,
    log_dir: Path,
    train_script: Path,
    num_cpus: int,
    container: Container | None = None,
) -> LaunchPlan:
    """The plan of an attempt on one machine with `num_cpus` cores."""
    ranks_per_node = run.config.launch.num_gpus
    environment = {
        # torchrun would set 1: far too few where a rank computes on the CPU.
        "OMP_NUM_THREADS": str(max(1, num_cpus // ranks_per_node)),
        # All that a rank reads is local; a node without network must not wait for the hub.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if run.accelerator == "cpu":
        # gloo looks up the host's own name otherwise, which fails on machines that don't know it.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return LaunchPlan(
        experiment_dir=Path(run.experiment_dir),
        run_file=run_file,
        log_dir=log_dir,
        ranks_per_node=ranks_per_node,
        environment=environment,
        train_script=train_script,
        asked_environment=dict(run.config.launch.environment),
        container=container,
        python=run.config.launch.python or ("python3" if container else sys.executable),
    )
