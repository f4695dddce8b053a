"""The job of a pretraining run: what its nodes run, and which folders they need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pretrainkit.config.launch import LaunchConfig
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.data.shards.urls import is_url
from pretrainkit.errors import RequestError
from pretrainkit.jobs.container import container_of
from pretrainkit.jobs.job import Job
from pretrainkit.jobs.scripts import CODE
from pretrainkit.jobs.secrets import is_secret, passed_on
from pretrainkit.jobs.submit import SECRETS
from pretrainkit.run.checkpoints import newest_committed
from pretrainkit.run.folder import RunFolder
from pretrainkit.units import parse_duration

NODE_MODULE = "pretrainkit.launch.node"
"""The module that starts the ranks of one node."""

_MIN_WARNING_S = 60
_MAX_WARNING_S = 65535
"""sbatch's bound."""


def job_of(run: ResolvedRun, *, folder: Path, run_file: Path, train_script: Path) -> Job:
    """The job that trains a run. Raises RequestError for unusable mounts, images, runtimes and variables."""
    config, experiment_dir = run.config.launch, Path(run.experiment_dir)
    check_environment(config)
    script = folder / CODE / train_script.parent.name / train_script.name
    node = ["--ranks", config.num_gpus, "--experiment_dir", experiment_dir, "--job_dir", folder]
    node += ["--num_nodes", config.num_nodes, "--accelerator", run.accelerator]
    margin_s = parse_duration(run.config.training.time_margin)
    node += ["--needed_time_s", margin_s] if run.config.training.time_limit else []
    node += [] if config.check_nodes else ["--no_check"]
    node += ["--slots_per_gpu", config.slots_per_gpu] if config.slots_per_gpu else []
    container = container_of(config, needs=needs_of(run), on_gpu=run.accelerator == "gpu")
    plain, secret = passed_on(os.environ)
    command = [python_of(config, container is not None), "-m", NODE_MODULE, *node, "--", script, "--run", run_file]
    return Job(
        name=run.config.experiment,
        folder=folder,
        work_dir=experiment_dir,
        command=tuple(map(str, command)),
        config=config,
        container=container,
        environment={**plain, **rank_environment(run)},
        on_gpu=run.accelerator == "gpu",
        num_nodes=config.num_nodes,
        ranks_per_node=config.num_gpus,
        time_limit=run.config.training.time_limit,
        warning_s=int(min(max(margin_s, _MIN_WARNING_S), _MAX_WARNING_S)),
        secrets=folder / SECRETS if secret else None,
    )


def rank_environment(run: ResolvedRun) -> dict[str, str]:
    """Variables that the ranks need on every executor; --env and the site can replace them."""
    environment = {
        # All that a rank reads is on disk; a node without network must not wait for the hub.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if run.accelerator == "cpu" and run.config.launch.num_nodes == 1:
        # gloo looks up the host's own name otherwise, which fails on machines that don't know it.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def python_of(config: LaunchConfig, in_container: bool) -> str:
    """The job's Python: the requested one, the image's, or this one."""
    return config.python or ("python3" if in_container else sys.executable)


def check_environment(config: LaunchConfig) -> None:
    """Refuse tokens among the variables, which are written to run.json and scripts."""
    secret = [name for name in config.environment if is_secret(name)]
    if secret:
        raise RequestError(
            f"{', '.join(secret)}: it would be written to files and command lines",
            action="export it before the start: tokens of your environment reach the job by a file only you can read",
            where="--env",
        )


def needs_of(run: ResolvedRun) -> list[Path]:
    """Folders that a node of the run reads and writes; initial weights only at the first start."""
    folders = [Path(run.experiment_dir), _with_blobs(Path(run.hf_folder))]
    folders += [Path(prefix).parent for prefix in run.dataset.prefixes if not is_url(prefix)]
    if run.initial_weights and not newest_committed(RunFolder.of(run).checkpoints):
        folders.append(Path(run.initial_weights.checkpoint))
    if run.config.launch.cache_dir:
        folders.append(Path(os.path.expandvars(run.config.launch.cache_dir)).expanduser())
    return list(dict.fromkeys(folders))


def _with_blobs(folder: Path) -> Path:
    """A model's folder; in the hub's cache the parent, as its files are links to a sibling folder."""
    return folder.parent.parent if folder.parent.name == "snapshots" else folder
