"""The job of a pretraining run: what its nodes run, which folders they need, and how it is submitted."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrainkit.config.launch import LaunchConfig
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.data.shards.urls import is_url
from pretrainkit.errors import RequestError
from pretrainkit.jobs import submit, watch
from pretrainkit.jobs.container import container_of
from pretrainkit.jobs.job import Evaluation, Job
from pretrainkit.jobs.scheduler import Run, runner_of
from pretrainkit.jobs.scripts import CODE
from pretrainkit.jobs.secrets import passed_on
from pretrainkit.run import branch, initial_weights
from pretrainkit.run.checkpoints import newest_committed
from pretrainkit.run.folder import LAUNCHER_LOCK, OUTCOME_FILE, RANKS_LOCK, RunFolder, locked
from pretrainkit.run.identity import write_run_file
from pretrainkit.run.live_line import live_line
from pretrainkit.run.progress import AttemptProgress, read_attempt
from pretrainkit.run.resource_plan import finalize_run
from pretrainkit.run.source import describe
from pretrainkit.units import parse_duration

NODE_MODULE = "pretrainkit.launch.node"
"""The module that starts the ranks of one node."""
EVALUATION_MODULE = "pretrainkit.evaluation.pending"
"""The module that evaluates the checkpoints that are due."""

_MIN_WARNING_S = 60
_MAX_WARNING_S = 65535
"""sbatch's bound."""


def new_job(
    config: LaunchConfig,
    *,
    folder: Path,
    words: Iterable[object],
    needs: list[Path],
    on_gpu: bool,
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> Job:
    """A job whose Python gets `words`; of the caller's environment it has the variables that concern it.

    `settings` are further fields of Job. Raises RequestError for unusable folders, mounts, images and runtimes.
    """
    if ":" in str(folder):  # PYTHONPATH leads to the source in it
        action = "rename it, or take another --experiments_dir (tools: --job_dir)"
        raise RequestError("can't hold jobs", needed="no ':' in the path", action=action, where=str(folder))
    container = container_of(config, needs=needs, on_gpu=on_gpu)
    plain, secret = passed_on(os.environ)
    return Job(
        folder=folder,
        command=(python_of(config, container is not None), *map(str, words)),
        config=config,
        container=container,
        environment={**plain, **(environment or {})},
        on_gpu=on_gpu,
        umask=_umask(),
        secrets=folder / submit.SECRETS if secret else None,
        **settings,
    )


def _umask() -> int:
    """This process's file mode creation mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def planned_job(run: ResolvedRun, train_script: Path) -> Job:
    """The job that would be submitted next for a run; its ranks run a copy of `train_script`, an absolute path."""
    config, experiment_dir = run.config.launch, Path(run.experiment_dir)
    folder = submit.next_folder(RunFolder.of(run).jobs)
    node = ["--ranks", config.num_gpus, "--experiment_dir", experiment_dir, "--job_dir", folder]
    node += ["--num_nodes", config.num_nodes, "--accelerator", run.accelerator]
    margin_s = parse_duration(run.config.training.time_margin)
    node += ["--needed_time_s", margin_s] if run.config.training.time_limit else []
    node += [] if config.check_nodes else ["--no_check"]
    node += ["--slots_per_gpu", config.slots_per_gpu] if config.slots_per_gpu else []
    node += ["--", folder / CODE / train_script.parent.name / train_script.name, "--run", RunFolder.of(run).run_file]
    job = new_job(
        config,
        folder=folder,
        words=["-m", NODE_MODULE, *node],
        needs=needs_of(run),
        on_gpu=run.accelerator == "gpu",
        name=run.config.experiment,
        work_dir=experiment_dir,
        environment=rank_environment(run),
        num_nodes=config.num_nodes,
        ranks_per_node=config.num_gpus,
        time_limit=run.config.training.time_limit,
        warning_s=int(min(max(margin_s, _MIN_WARNING_S), _MAX_WARNING_S)),
    )
    return dataclasses.replace(job, evaluation=_evaluation(run, folder)) if run.config.training.eval_tasks else job


def _evaluation(run: ResolvedRun, training_folder: Path) -> Evaluation:
    """The job that evaluates what is due: on one node, with as many GPUs as the tensor parallel size."""
    tasks = run.config.training.eval_tasks
    size = run.config.parallel.tensor_model_parallel_size
    config = dataclasses.replace(run.config.launch, num_nodes=1, num_gpus=size, chain=1, requeue=False)
    job = new_job(
        config,
        folder=training_folder / "evaluation",
        words=["-m", EVALUATION_MODULE, run.experiment_dir],
        needs=[*needs_of(run), Path.cwd(), *(Path(task).absolute().parent for task in tasks if Path(task).is_file())],
        on_gpu=run.accelerator == "gpu",
        name=f"{run.config.experiment}_evaluation",
        work_dir=Path.cwd(),
        environment={"TOKENIZERS_PARALLELISM": "false"},
        ranks_per_node=size,
        time_limit=run.config.training.time_limit,
    )
    return Evaluation(RunFolder.of(run).evaluations, job)


def start_job(run: ResolvedRun, *, train_script: Path, command_line: Sequence[str], follow: bool) -> int:
    """Submit the job of a run; wait for its end with `follow`.

    Raises PretrainkitError when the scheduler refuses it: run.json and converted weights stay, the job's folder
    doesn't.
    """
    folder = RunFolder.of(run)
    earlier = set(folder.attempt_folders())

    def progress() -> AttemptProgress | None:
        new = [path for path in folder.attempt_folders() if path not in earlier]
        return read_attempt(new[-1]) if new and not (new[-1] / OUTCOME_FILE).exists() else None

    with locked(folder, LAUNCHER_LOCK):
        with locked(folder, RANKS_LOCK):
            job = planned_job(run, train_script.resolve())
            _refuse_second(folder, runner_of(run.config.launch))
            run = finalize_run(run)
            initial_weights.provide_for(run)
        write_run_file(run)
        branch.link_checkpoint(run)
        submitted = submit.submit(job, train_script.resolve(), describe(run, command_line))
    line = live_line(progress, run.max_steps, sys.stderr, metrics=folder.metrics, before="waiting for the job")
    return watch.announce(submitted, run.config.launch, follows=follow, shown=line)


def _refuse_second(folder: RunFolder, commands: Run) -> None:
    """Two jobs of one experiment would train the same steps: refuse while an earlier one is queued or running."""
    for submitted in submit.read_records(folder.jobs)[-1:]:
        job = submitted.successor or submitted
        if job.is_alive(commands):
            raise RequestError(
                f"job {job.job_id} of this experiment is queued or running",
                action=f"wait for it, or cancel it ({job.cancel_command}); --chain submits several in a row",
                where=str(folder.path),
            )


def rank_environment(run: ResolvedRun) -> dict[str, str]:
    """Variables that the ranks need on every executor; --env and the site can replace them."""
    environment = {
        # All that a rank reads is on disk; a node without network must not wait for the hub.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Otherwise each connection of a network without names for addresses gives a line of torch's rendezvous.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if run.accelerator == "cpu" and run.config.launch.num_nodes == 1:
        # gloo looks up the host's own name otherwise, which fails on machines that don't know it.
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def python_of(config: LaunchConfig, in_container: bool) -> str:
    """The job's Python: the requested one, the image's, or this one."""
    return config.python or ("python3" if in_container else sys.executable)


def needs_of(run: ResolvedRun) -> list[Path]:
    """Folders that a node of the run reads and writes; initial weights only at the first start."""
    hf_folder = Path(run.hf_folder)
    if hf_folder.parent.name == "snapshots":  # in the hub's cache, whose files are links to a sibling folder
        hf_folder = hf_folder.parent.parent
    folders = [Path(run.experiment_dir), hf_folder]
    prefixes = (prefix for dataset in run.datasets for prefix in dataset.prefixes)
    folders += [Path(prefix).parent for prefix in prefixes if not is_url(prefix)]
    if run.initial_weights and not newest_committed(RunFolder.of(run).checkpoints):
        folders.append(Path(run.initial_weights.checkpoint))
    if run.config.launch.cache_dir:
        folders.append(Path(os.path.expandvars(run.config.launch.cache_dir)).expanduser())
    return list(dict.fromkeys(folders))
